"""Waiting for an endpoint that is down, so that a run pauses rather than ends."""

import logging
import re
import threading
import time
from collections.abc import Callable

from dsv32_jax.errors import WorkFailedError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
POLL_S = 0.2  # between looks at whether the run is to stop


class RequestError(Exception):
    """This request comes to nothing, though the endpoint is up."""


class Outage:
    """Repeats requests while an endpoint is down, with one line when it goes and one when it is back.

    Args:
        who: Such as "the judge".
        base_url: Of the endpoint.
        model: That is asked for.
        attempts: Failures to bear on one request while others succeed.
        give_up_s: Seconds it may be down before the run stops; None waits without end.
        should_stop: Asked while it is down; True ends the wait.
    """

    def __init__(
        self,
        who: str,
        base_url: str,
        *,
        model: str,
        attempts: int,
        give_up_s: float | None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Keep what is given; the class docstring has the arguments."""
        self._who, self._where = who, f"{who} at {base_url}"
        self._model = model
        self._attempts, self._give_up_s = attempts, give_up_s
        self._should_stop = should_stop
        self._lock = threading.Lock()
        self._since: float | None = None
        self._successes = 0

    def ride_out[Reply](self, request: Callable[[], Reply]) -> Reply:
        """Repeat a request until the endpoint answers it.

        Args:
            request: Sends it; an `openai.APIError` says that there was no answer.

        Returns:
            What it returned.

        Raises:
            RequestError: If the endpoint refuses it, or others succeed and this one does not.
            WorkFailedError: If the endpoint refuses key or model, is down for too long, or the run is to stop
                meanwhile.
        """
        import openai

        own, pause, successes = 0, FIRST_PAUSE_S, self._successes
        while True:
            try:
                reply = request()
            except (
                openai.AuthenticationError,
                openai.PermissionDeniedError,
                openai.NotFoundError,
            ) as error:
                raise WorkFailedError(f"{self._where} refuses {self._model!r}: {error}") from error
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                raise RequestError(f"{self._where} refuses the request: {error}") from error
            except openai.APIError as error:
                # The endpoint is up for others, so it may be this request that it can not bear.
                own = own + 1 if self._successes > successes else 0
                successes = self._successes
                if own >= self._attempts:
                    raise RequestError(
                        f"{self._who} fails on this request alone: {error}"
                    ) from error
                self._went_down(error)
                self._wait(max(pause, _retry_after(error)))
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                self._came_back()
                return reply

    def _went_down(self, error: Exception) -> None:
        with self._lock:
            if self._since is None:
                self._since = time.monotonic()
                logger.warning("%s is down (%s); the run waits for it", self._where, error)
            down_s = time.monotonic() - self._since
        if self._give_up_s is not None and down_s > self._give_up_s:
            raise WorkFailedError(f"{self._where} is down for {down_s:.0f} s: {error}") from error

    def _came_back(self) -> None:
        with self._lock:
            self._successes += 1
            if self._since is not None:
                down_s = time.monotonic() - self._since
                logger.warning("%s is back after %.0f s", self._who, down_s)
            self._since = None

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._should_stop():
                raise WorkFailedError(f"the run was stopped while it waited for {self._who}")
            time.sleep(min(POLL_S, seconds))


def _retry_after(error: Exception) -> float:
    """Return the seconds that an endpoint asks to be left alone."""
    response = getattr(error, "response", None)
    text = response.headers.get("retry-after", "") if response is not None else ""
    return min(float(text), LONGEST_PAUSE_S) if re.fullmatch(r"\d{1,6}", text) else 0.0
