"""Processes meet at a port that anybody may knock at, and each of them gets the same verdict."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from dsv32_jax import rendezvous
from dsv32_jax.rendezvous import Greeting, Place, Verdict

HOST = socket.gethostname()


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def meet(port):
    """Return a function that lets processes meet, each as (number, how many it thinks there are)."""

    def meet(*processes, timeout_s=20.0, **options):
        def one(index, count):
            place = Place("127.0.0.1", port, count, index)
            own = Greeting("test", index, count, said={"double": 2 * index})
            return rendezvous.meet(place, own, timeout_s, show=lambda line: None, **options)

        with ThreadPoolExecutor(len(processes)) as threads:
            return list(threads.map(lambda process: one(*process), processes))

    return meet


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_processes_that_agree_all_get_an_empty_verdict(meet, order):
    assert meet(*((index, 3) for index in order)) == [Verdict([])] * 3


def test_one_process_meets_nobody(meet):
    began = time.monotonic()
    assert meet((0, 1)) == [Verdict([])]
    assert time.monotonic() - began < 1


def test_what_they_said_is_compared_and_told_to_all(meet):
    def compare(callers):
        return [f"{i}: {greeting.said['double']}" for i, (greeting, _) in sorted(callers.items())]

    assert meet((0, 2), (1, 2), compare=compare) == [Verdict(["0: 0", "1: 2"])] * 2


@pytest.mark.parametrize("count", [2, 3])
def test_a_number_given_twice_is_told_to_all_though_one_is_missing_for_it(meet, count):
    wrong = [f"two processes say that they are number 1: on {HOST} and on {HOST}"]
    missing = "" if count == 2 else "2 of 3 processes came; missing: 2"
    assert meet((0, count), (1, count), (1, count)) == [Verdict(wrong, missing)] * 3


def test_another_count_is_told_to_both(meet):
    wrong = [f"process 1 ({HOST}) thinks there are 3 processes, process 0 2"]
    assert meet((0, 2), (1, 3)) == [Verdict(wrong)] * 2


def test_a_number_beyond_the_count_does_not_stand_in_for_one_that_is_missing(meet):
    zero, _ = meet((0, 2), (5, 10))
    assert zero.wrong == [f"process 5 ({HOST}) thinks there are 10 processes, process 0 2"]
    assert zero.missing == "1 of 2 processes came; missing: 1"


def test_who_does_not_come_is_named_to_the_others(meet):
    verdict = Verdict([], "2 of 3 processes came; missing: 1")
    assert meet((0, 3), (2, 3), timeout_s=1.0) == [verdict] * 2


def test_a_count_that_is_a_mistake_costs_nothing(meet):
    (verdict,) = meet((0, 10**12), timeout_s=0.1)
    assert verdict.missing.startswith("1 of 1000000000000 processes came; missing: 1, 2, 3")
    assert verdict.missing.endswith("10 ...")


def greeting(**changes):
    return json.dumps(asdict(Greeting("test", 1, 2)) | changes).encode() + b"\n"


def connect(port):
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        time.sleep(0.01)
    raise TimeoutError


STRANGERS = (
    b"",  # says nothing, and stays
    b"GET / HTTP/1.0\r\n\r\n",
    b"\xff\xfe\x00\n",
    b"x" * 200_000,
    b"[1, 2]\n",
    b"3\n",
    b"[" * 50_000 + b"\n",
    greeting(program="train.doctor"),
    greeting(index="1"),
    greeting(index=-1),
    greeting(count=None),
    greeting(x=1),
)


def test_strangers_are_not_counted_and_keep_nobody(meet, port, caplog):
    stop = threading.Event()

    def knock(words):
        with connect(port) as stranger, contextlib.suppress(OSError):
            stranger.sendall(words)
            stop.wait(20)

    with ThreadPoolExecutor(len(STRANGERS)) as threads:
        knocking = [threads.submit(knock, words) for words in STRANGERS]
        verdicts = meet((0, 2), timeout_s=2.0)
        stop.set()
    assert [stranger.result() for stranger in knocking] == [None] * len(STRANGERS)
    assert verdicts == [Verdict([], "1 of 2 processes came; missing: 1")]
    assert caplog.text == ""


def test_a_process_that_is_started_again_meanwhile_is_not_two(port):
    def meet(index):
        place = Place("127.0.0.1", port, 3, index)
        return rendezvous.meet(place, Greeting("test", index, 3), 20.0, show=lambda line: None)

    with ThreadPoolExecutor(3) as threads:
        zero = threads.submit(meet, 0)
        for _ in range(2):
            with connect(port) as killed:
                killed.sendall(greeting(count=3))
                time.sleep(0.2)
        others = [threads.submit(meet, index) for index in (1, 2)]
        assert [verdict.result() for verdict in (zero, *others)] == [Verdict([])] * 3


def serve(*replies):
    """Answer one caller after the other with something; return the port and the thread."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer():
        with server:
            for reply in replies:
                caller, _ = server.accept()
                with caller:
                    caller.recv(10_000)
                    caller.sendall(reply)

    thread = threading.Thread(target=answer)
    thread.start()
    return server.getsockname()[1], thread


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.0 400 Bad request\n",
        b"\xff\xfe\n",
        b"3\n",
        b"[]\n",
        b'[1, ""]\n',
        b'[[""]]\n',
        b"[" * 5000 + b"\n",
    ],
)
def test_something_else_at_process_0s_port_is_said_at_once_to_the_impatient(reply):
    port, thread = serve(reply)
    place, lines = Place("127.0.0.1", port, 2, 1), []
    verdict = rendezvous.meet(place, Greeting("test", 1, 2), 60.0, show=lines.append, patient=False)
    thread.join()
    assert "(what answers there is not process 0 of test)" in verdict.unmet
    assert len(lines) == 1


def test_an_earlier_run_that_is_about_to_end_is_waited_for():
    earlier, later = b"\x00\x00\x12\x04\xff\n", b'[["told"], ""]\n'
    port, thread = serve(earlier, earlier, earlier, later)
    place, lines = Place("127.0.0.1", port, 2, 1), []
    verdict = rendezvous.meet(place, Greeting("test", 1, 2), 20.0, show=lines.append)
    thread.join()
    assert verdict == Verdict(["told"])
    assert [line.split(";")[0] for line in lines] == [
        f"reached {place.address}",
        f"{place.address}: what answers there is not process 0 of test",
    ]


def test_nobody_at_the_port_is_said_after_the_time(port):
    place = Place("127.0.0.1", port, 2, 1)
    verdict = rendezvous.meet(place, Greeting("test", 1, 2), 0.5, show=print)
    assert (
        verdict.unmet
        == f"process 0 was not reached at {place.address} from {HOST} (Connection refused)"
    )


def test_a_port_that_is_taken_is_said(port):
    with socket.create_server(("0.0.0.0", port)):
        verdict = rendezvous.meet(Place("h", port, 2, 0), Greeting("test", 0, 2), 1.0, show=print)
    assert verdict.unmet.startswith(f"port {port} cannot be listened on: ")
