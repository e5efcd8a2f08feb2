"""A real Ray cluster of two machines, which are two servers on this one."""

import functools
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsv32_jax.errors import UsageError, WorkFailedError
from train.rl import ray_workers
from train.rl.pool import Pool, WorkerError
from train.rl.ray_workers import RayWorkers
from train.rl.rewards import Response, RewardConfig, Rewarder, Weights
from train.rl.tasks import Task

ROOT = Path(__file__).parents[3]
MACHINE = "DSV32_TEST_MACHINE"  # which server an item runs on
MEMORY = 80 * 2**20  # of a server's object store, about the least


@pytest.fixture(scope="module")
def cluster():
    with ray_workers._signals_kept():
        pytest.importorskip("ray", reason="needs the extra ray")
        from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        paths = (str(ROOT), *sys.path)  # the functions below must be found there
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        cluster = Cluster()
        for number in range(2):
            add_machine(cluster, number, patch)
        yield cluster
        cluster.shutdown()


def add_machine(cluster, number, patch):
    patch.setenv(MACHINE, str(number))
    return cluster.add_node(num_cpus=2, include_dashboard=False, object_store_memory=MEMORY)


def ready():
    """Prepare nothing."""


def unready(error):
    raise error


def wait_here(seconds):
    time.sleep(seconds)
    return int(os.environ[MACHINE])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise KeyError("no such thing")


def eat(mib):
    return len(bytearray(mib * 2**20))


@pytest.fixture
def make(cluster):
    pools = []

    def make(n_workers, *, prepare=ready):
        workers = RayWorkers(cluster.address, timeout_s=3.0, memory_mib=512, prepare=prepare)
        try:
            pools.append(Pool(n_workers, workers))
        except BaseException:
            workers.close()
            raise
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.slow
def test_items_run_on_every_machine(make):
    pool = make(4)
    with ThreadPoolExecutor(4) as threads:
        places = list(threads.map(lambda _: pool.call(wait_here, 2.0), range(4)))

    assert set(places) == {0, 1}


@pytest.mark.slow
def test_limits_and_faults_are_those_of_the_pool_here(make):
    pool = make(1)
    faults = []
    for function, *arguments in ((time.sleep, 60), (die,), (fail,), (eat, 600)):
        with pytest.raises(WorkerError) as caught:
            pool.call(function, *arguments)
        faults.append((caught.value.fault, str(caught.value)))

    assert faults[:3] == [
        ("hung", "not done after 3 s"),
        ("killed", "two workers died on it, the last with exit code -9"),
        ("raised", "KeyError: 'no such thing'"),
    ]
    assert (faults[3][0], faults[3][1].partition(":")[0]) == ("raised", "MemoryError")
    assert pool.call(divmod, 7, 2) == (3, 1)


@pytest.mark.slow
def test_items_of_a_machine_that_is_gone_are_tried_on_another(cluster, make, monkeypatch, caplog):
    third = add_machine(cluster, 2, monkeypatch)
    cluster.wait_for_nodes()
    pool = make(4)
    with ThreadPoolExecutor(4) as threads:
        before = list(threads.map(lambda _: pool.call(wait_here, 1.5), range(4)))
        running = [threads.submit(pool.call, wait_here, 2.5) for _ in range(4)]
        time.sleep(0.5)
        cluster.remove_node(third, allow_graceful=False)
        after = [future.result(90) for future in running]

    assert 2 in before  # else nothing was lost
    assert set(after) <= {0, 1}
    assert "a reward worker died" in caplog.text


@pytest.mark.slow
def test_what_prepare_raises_is_told(make):
    with pytest.raises(UsageError, match=r"^no such file$"):
        make(1, prepare=functools.partial(unready, UsageError("no such file")))
    with pytest.raises(WorkFailedError, match=r"does not start .*ZeroDivisionError: by zero"):
        make(1, prepare=functools.partial(unready, ZeroDivisionError("by zero")))


@pytest.mark.slow
def test_a_cluster_without_room_is_not_waited_for(make, monkeypatch):
    pool = make(5)
    with ThreadPoolExecutor(5) as threads:
        list(threads.map(lambda _: pool.call(wait_here, 2.9), range(4)))  # four CPUs are taken
        monkeypatch.setattr(ray_workers, "PLACE_S", 1.0)
        monkeypatch.setattr(ray_workers, "START_S", 1.0)
        running = [threads.submit(pool.call, wait_here, 2.9) for _ in range(5)]
        errors = [future.exception(60) for future in running]

    (error,) = filter(None, errors)
    assert isinstance(error, WorkFailedError)
    assert "each takes a CPU of the cluster, of which 0 are free" in str(error)


@pytest.mark.slow
def test_closing_ends_what_is_under_way(make):
    pool = make(1)
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(pool.call, time.sleep, 60) for _ in range(2)]
        time.sleep(1.0)
        pool.close()
        errors = [future.exception(10) for future in running]

    assert [str(error) for error in errors] == ["the pool was closed"] * 2


@pytest.mark.slow
def test_ray_leaves_the_signals_to_the_run(cluster):
    code = f"""if 1:
        import signal
        def stop(number, frame): print("saved")
        signal.signal(signal.SIGTERM, stop)
        from train.rl.ray_workers import RayWorkers
        workers = RayWorkers({cluster.address!r}, timeout_s=1.0, memory_mib=64, prepare=print)
        signal.raise_signal(signal.SIGTERM)
        workers.close()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_named_in_a_line(cluster):
    with pytest.raises(UsageError, match=r"^rewards.ray=127.0.0.1:9: no Ray cluster .*") as caught:
        RayWorkers("127.0.0.1:9", timeout_s=1.0, memory_mib=64, prepare=ready)

    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_responses_are_rewarded_there(cluster, tmp_path, monkeypatch):
    code = f"import os\ndef reward(task, text, tokens):\n    return 5.0 + int(os.environ[{MACHINE!r}])\n"
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    cfg = RewardConfig(
        weights=(Weights(custom=1.0),), style="plain", custom="mine.py:reward", workers=1,
        ray=cluster.address,
    )  # fmt: skip
    task = Task(name="t", domain="x", question="1 + 1", answer="2", verifier="numeric")

    with Rewarder(cfg, tmp_path) as rewarder:
        right, wrong = rewarder.score(
            [task, task], [Response(text, 1, cut=False) for text in ("2", "3")]
        )

    assert right.components["correct"] == 1
    assert right.total in (6.0, 7.0)
    assert wrong.total in (5.0, 6.0)
