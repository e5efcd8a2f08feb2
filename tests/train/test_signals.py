import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from train import signals

LOOP = """
import time
from train import signals
with signals.StopOnSignal() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saving after", stop.requested, flush=True)
    time.sleep(float({pause}))
print("saved", flush=True)
"""


def start(pause):
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP.format(pause=pause)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_the_loop_save_and_leave(number):
    process = start(pause=0)

    process.send_signal(number)
    out, _ = process.communicate(timeout=10)

    assert out == f"saving after {number.value}\nsaved\n"
    assert process.returncode == 0


def test_a_second_sigterm_ends_the_process_at_once():
    process = start(pause=60)

    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saving after 15\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)

    assert out == ""
    assert process.returncode == -signal.SIGTERM


def test_a_second_interrupt_is_a_keyboard_interrupt():
    with signals.StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_from_before_are_put_back():
    def earlier(number, frame):
        raise AssertionError("not reached")

    before = {number: signal.signal(number, earlier) for number in signals.STOP_SIGNALS}
    try:
        with signals.StopOnSignal() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested == signal.SIGTERM
        after = [signal.getsignal(number) for number in signals.STOP_SIGNALS]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    assert after == [earlier, earlier]


def test_nothing_is_requested_before_a_signal():
    with signals.StopOnSignal() as stop:
        assert stop.requested == 0
