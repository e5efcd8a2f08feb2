"""What the sandbox of `train/agents/` costs: sessions started, calls, and one-off runs; `--help` has examples."""

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dsv32_jax import command_line
from train.agents import isolation, runs
from train.agents.pool import SessionPool
from train.agents.session import Session

SUMMARY = "Time the sandbox of programs that models write, on this machine."
EXAMPLES = """
python benchmarks/sandbox.py
python benchmarks/sandbox.py --repeats 100 --pool 8
"""


def main() -> int:
    """Print the figures; returns the exit status."""
    with command_line.Boundary(resumes=False) as boundary:
        parser = command_line.Parser(
            name="python benchmarks/sandbox.py", summary=SUMMARY, examples=EXAMPLES
        )
        parser.add_argument("--repeats", type=int, default=20, metavar="N", help="(20)")
        parser.add_argument(
            "--pool", type=int, default=2, metavar="N", help="sandboxes at a time (2)"
        )
        args = parser.parse_args()
        isolation.require_isolation()
        boundary.started = True
        measure(args.repeats, args.pool)
    return boundary.status


def measure(repeats: int, size: int) -> None:
    """Print medians of single operations, and rates of many at a time."""
    python = [sys.executable, "-I", "-c", "print(1)"]
    show("run of /bin/true", times(lambda: runs.run(["true"]), repeats))
    show("run of a Python program", times(lambda: runs.run(python), repeats))
    with ThreadPoolExecutor(size) as threads:
        rate(
            f"runs of a Python program, {size} at a time",
            threads,
            lambda: runs.run(python),
            repeats,
        )
    show("session, cold", times(lambda: Session().close(), repeats))
    with Session() as session:
        show("call of Python", times(lambda: session.python("1 + 1"), repeats))
        show("call of bash", times(lambda: session.bash("true"), repeats))
        show("1 MiB file in and out", times(lambda: copy(session, bytes(2**20)), repeats))
    with SessionPool(size) as pool, ThreadPoolExecutor(size) as threads:
        time.sleep(5)  # until all are warm
        show("session, warm, with one call", [timed(lambda: use(pool)) for _ in range(size)])
        rate(f"sessions with one call, pool of {size}", threads, lambda: use(pool), repeats)


def use(pool: SessionPool) -> None:
    """Do the least that a session is for."""
    with pool.session() as session:
        session.python("1 + 1")


def copy(session: Session, data: bytes) -> None:
    """Send a file in and take it out."""
    session.put("file", data)
    session.get("file")


def times(action: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds that each repeat took, after one to warm up."""
    action()
    return [timed(action) for _ in range(repeats)]


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def rate(
    name: str, threads: ThreadPoolExecutor, action: Callable[[], object], repeats: int
) -> None:
    """Print how many a second come through."""
    started = time.perf_counter()
    list(threads.map(lambda _: action(), range(repeats)))
    print(f"{name:45} {repeats / (time.perf_counter() - started):8.2f} /s", flush=True)


def show(name: str, seconds: list[float]) -> None:
    """Print the median and the largest."""
    print(
        f"{name:45} {1000 * statistics.median(seconds):8.1f} ms  (max {1000 * max(seconds):.1f})",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
