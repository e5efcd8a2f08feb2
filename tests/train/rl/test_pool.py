import functools
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dsv32_jax.errors import UsageError, WorkFailedError
from train.rl.pool import LocalWorkers, Pool, WorkerError


def ready():
    """Prepare nothing."""


def unready(error):
    raise error


def die_once(marker):
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "alive"
    os.kill(os.getpid(), signal.SIGKILL)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang(seconds):
    """Hang where no Python handler of a signal could run."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    time.sleep(seconds)


def fail():
    raise KeyError("no such thing")


def eat(mib):
    return len(bytearray(mib * 2**20))


def limit():
    return signal.getitimer(signal.ITIMER_REAL)[0]


def make(n_workers, *, timeout_s=1.0, prepare=ready):
    return Pool(n_workers, LocalWorkers(timeout_s=timeout_s, memory_mib=512, prepare=prepare))


@pytest.fixture(scope="module")
def pool():
    with make(2, timeout_s=2.0) as pool:
        yield pool


def fault_of(pool, function, *arguments):
    with pytest.raises(WorkerError) as caught:
        pool.call(function, *arguments)
    return caught.value.fault, str(caught.value)


def test_work_is_done_in_another_process(pool):
    assert pool.call(os.getpid) != os.getpid()
    assert pool.call(divmod, 7, 2) == (3, 1)


def test_two_items_run_at_once(pool):
    began = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: pool.call(time.sleep, 1.0), range(2)))

    assert time.monotonic() - began < 1.9


def test_an_item_that_hangs_is_killed_and_the_next_runs(pool):
    began = time.monotonic()

    assert fault_of(pool, hang, 60) == ("hung", "not done after 2 s")
    assert time.monotonic() - began < 4
    pids = {pool.call(os.getpid) for _ in range(4)}
    assert len(pids) == 2  # both places are taken again
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(pool.call, abs, -3).result(5) == 3


def test_an_item_that_raises_is_named_and_the_process_stays(pool):
    pids = {pool.call(os.getpid) for _ in range(4)}

    assert fault_of(pool, fail) == ("raised", "KeyError: 'no such thing'")
    assert {pool.call(os.getpid) for _ in range(4)} == pids


def test_an_item_whose_process_was_killed_is_tried_again(pool, tmp_path):
    assert pool.call(die_once, str(tmp_path / "marker")) == "alive"


def test_an_item_that_kills_its_process_twice_is_given_up(pool):
    assert fault_of(pool, die) == ("killed", "two workers died on it, the last with exit code -9")
    assert pool.call(abs, -1) == 1


def test_an_idle_process_may_be_killed(pool):
    for pid in {pool.call(os.getpid) for _ in range(4)}:
        os.kill(pid, signal.SIGKILL)

    assert [pool.call(abs, -n) for n in range(4)] == [0, 1, 2, 3]


def test_a_process_may_be_killed_at_work(pool):
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(pool.call, time.sleep, 1.0) for _ in range(2)]
        time.sleep(0.3)
        for worker in multiprocessing_children():
            os.kill(worker, signal.SIGKILL)
        assert [future.result(10) for future in running] == [None, None]


def multiprocessing_children():
    return [child.pid for child in multiprocessing.active_children() if child.name == "reward"]


def test_memory_is_limited(pool):
    fault, message = fault_of(pool, eat, 600)

    assert (fault, message.partition(":")[0]) == ("raised", "MemoryError")
    assert pool.call(eat, 100) == 100 * 2**20


def test_a_worker_ends_itself_where_nobody_else_does(pool):
    assert 6 < pool.call(limit) <= 7


def test_what_prepare_raises_is_told():
    wrong = functools.partial(unready, UsageError("no such file"))
    with pytest.raises(UsageError, match=r"^no such file$"):
        make(1, prepare=wrong)
    broken = functools.partial(unready, ZeroDivisionError("by zero"))
    with pytest.raises(WorkFailedError, match=r"does not start .*ZeroDivisionError: by zero"):
        make(1, prepare=broken)


def test_closing_leaves_no_process():
    before = set(multiprocessing_children())
    with make(2) as pool:
        pool.call(abs, 1)
        assert set(multiprocessing_children()) > before

    assert set(multiprocessing_children()) == before


def test_closing_ends_what_is_under_way():
    pool = make(2, timeout_s=60.0)
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(pool.call, hang, 60) for _ in range(3)]
        time.sleep(1.0)
        began = time.monotonic()
        pool.close()
        errors = [future.exception(10) for future in running]

    assert time.monotonic() - began < 5
    assert [str(error) for error in errors] == ["the pool was closed"] * 3
