import io
import threading
import time

import pytest

from dsv32_jax.convert import pool


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_line_has_amounts_speed_and_time_left():
    clock = Clock()
    progress = pool.Progress("converting", 689_500_000_000, stream=io.StringIO(), clock=clock)
    clock.now = 100.0

    progress.add(120_000_000_000)

    assert progress.text() == "converting 120.0/689.5 GB  1.20 GB/s  0:07:55 left"


def test_lines_come_at_intervals_and_the_last_always():
    stream, clock = io.StringIO(), Clock()
    progress = pool.Progress("verifying", 10_000_000_000, stream=stream, clock=clock)

    for second in range(1, 6):
        clock.now = 4.0 * second
        progress.add(2_000_000_000)
    progress.close()

    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "verifying 2.0/10.0 GB", "verifying 8.0/10.0 GB", "verifying 10.0/10.0 GB",
    ]  # fmt: skip


def test_every_item_is_done_once_by_several_threads():
    done, names, lock = [], set(), threading.Lock()

    def work(item):
        time.sleep(0.002)
        with lock:
            done.append(item)
            names.add(threading.current_thread().name)

    pool.run_all(work, list(range(50)), threads=4)

    assert sorted(done) == list(range(50))
    assert 1 < len(names) <= 4


def test_the_first_error_stops_the_rest():
    done = []

    def work(item):
        if item == 3:
            raise ValueError("item 3")
        time.sleep(0.001)
        done.append(item)

    with pytest.raises(ValueError, match="item 3"):
        pool.run_all(work, list(range(1000)), threads=2)
    assert len(done) < 100


@pytest.mark.parametrize("threads", [1, 2, 5, 8])
def test_of_several_errors_the_earliest_items_is_told_whichever_comes_first(threads):
    others_failed = threading.Event()

    def work(item):
        if item == 3 and threads > 1:
            assert others_failed.wait(10)
        if item >= 3:
            others_failed.set()
            raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 3"):
        pool.run_all(work, list(range(20)), threads=threads)


def test_nothing_to_do_is_done_at_once():
    done = []
    pool.run_all(done.append, [], threads=3)
    assert done == []
