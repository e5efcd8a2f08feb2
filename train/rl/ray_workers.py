"""Reward workers on the machines of a Ray cluster: each is an actor that holds one process of `pool.py`.

The actor's machine enforces the limits of an item, as this one does without Ray; Ray finds the places, and says when an
actor or its machine is gone.
"""

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from dsv32_jax.errors import UsageError, UserError, WorkFailedError
from train.rl.pool import MAX_STARTS, START_S, Fault, LocalWorkers, LostError, Pool, WorkerError

CONNECT_S = 10.0
PLACE_S = 60.0  # that a cluster may take to find a place, beside what a process takes to start


class _Outcome(NamedTuple):
    """What an item, or a start, came to; sent as a value, as Ray would wrap an exception in its own.

    Attributes:
        kind: What happened.
        value: The result, or the message.
    """

    kind: Fault | Literal["done", "usage", "failed"]
    value: Any


class _Actor:
    """One process, on the machine where Ray puts this."""

    def start(self, options: dict[str, Any]) -> _Outcome:
        """Start the process."""
        try:
            self._pool = Pool(1, LocalWorkers(**options))
        except UserError as error:
            return _Outcome("usage" if isinstance(error, UsageError) else "failed", str(error))
        return _Outcome("done", None)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> _Outcome:
        """Run a function there."""
        try:
            return _Outcome("done", self._pool.call(function, *arguments))
        except WorkerError as error:
            return _Outcome(error.fault, str(error))
        except WorkFailedError as error:
            return _Outcome("failed", str(error))


class RayWorkers:
    """Workers that are actors of a Ray cluster, one CPU each, on as many machines as have room.

    Args:
        address: Of the cluster's head, HOST:PORT; this machine must be one of the cluster's.
        timeout_s: As for `LocalWorkers`, and so are the others.
        memory_mib: The same.
        prepare: The same; its module must be installed on each machine.
        preload: The same.

    Raises:
        UsageError: If ray is not installed, or no such cluster answers.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        memory_mib: int,
        prepare: Callable[[], None],
        preload: Sequence[str] = (),
    ) -> None:
        """Join the cluster."""
        host, _, port = address.rpartition(":")
        with _signals_kept():
            try:
                import ray

                socket.create_connection(
                    (host, int(port)), CONNECT_S
                ).close()  # ray would try for minutes
                ray.init(address, log_to_driver=False, configure_logging=False)
            except ImportError as error:
                raise UsageError(
                    f"rewards.ray={address} needs `pip install 'dsv32-jax[ray]'` ({error})"
                ) from error
            except (OSError, ValueError, RuntimeError) as error:
                raise UsageError(
                    f"rewards.ray={address}: no Ray cluster answers there: {_first_line(error)}"
                ) from error
        self._ray, self._address = ray, address
        self._actor_class = ray.remote(num_cpus=1, max_restarts=0)(_Actor)
        self._options = {
            "timeout_s": timeout_s, "memory_mib": memory_mib, "prepare": prepare, "preload": tuple(preload),
        }  # fmt: skip
        # The process may be replaced, and its item tried again, before this side gives the actor up.
        self._longest_s = 2 * (timeout_s + START_S)

    def start(self) -> "_Remote":
        """Start an actor and its process; one that is gone before it is ready is no more than one lost."""
        for _ in range(MAX_STARTS):
            worker = _Remote(self._ray, self._spread().remote(), self._longest_s)
            try:
                outcome = worker.ask(START_S + PLACE_S, "start", self._options)
            except LostError as error:
                worker.kill()
                lost = error
                continue
            except WorkerError as error:
                worker.kill()
                cpus = self._ray.available_resources().get("CPU", 0)
                raise WorkFailedError(
                    f"no reward worker started at rewards.ray={self._address} ({error}): each takes a CPU of the"
                    f" cluster, of which {cpus:g} are free"
                ) from error
            if outcome.kind != "done":
                worker.kill()
                kind = UsageError if outcome.kind == "usage" else WorkFailedError
                raise kind(outcome.value)
            return worker
        raise WorkFailedError(
            f"a reward worker does not start at rewards.ray={self._address}: {lost}"
        )

    def _spread(self) -> Any:
        return self._actor_class.options(scheduling_strategy="SPREAD")

    def close(self) -> None:
        """Leave the cluster, which ends what is still there of this run."""
        self._ray.shutdown()


class _Remote:
    """An actor, as `Pool` sees it."""

    def __init__(self, ray: Any, actor: Any, longest_s: float) -> None:
        self._ray, self._actor, self._longest_s = ray, actor, longest_s
        self._killed = False

    def is_alive(self) -> bool:
        """Tell whether nobody has ended it; that its machine is gone shows at the next call."""
        return not self._killed

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run a function there."""
        outcome = self.ask(self._longest_s, "call", function, arguments)
        if outcome.kind == "done":
            return outcome.value
        if outcome.kind == "usage" or outcome.kind == "failed":
            raise WorkFailedError(outcome.value)
        raise WorkerError(outcome.kind, outcome.value)

    def ask(self, seconds: float, method: str, *arguments: Any) -> _Outcome:
        """Call a method of the actor."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(getattr(self._actor, method).remote(*arguments), timeout=seconds)
        except errors.GetTimeoutError as error:
            raise WorkerError("hung", f"no answer after {seconds:g} s") from error
        except errors.RayTaskError as error:  # Ray's own part there failed, such as an import
            raise WorkFailedError(f"a Ray machine can not reward: {_last_line(error)}") from error
        except errors.RayError as error:
            raise LostError(_first_line(error)) from error

    def kill(self) -> None:
        """End the actor whatever it does."""
        self._killed = True
        self._ray.kill(self._actor)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Put back the signals' handlers, which ray replaces when it is imported: SIGTERM would end the run unsaved."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]
