"""uvicorn, which on a signal first lets running requests finish while it turns new ones away."""

import logging
import socket
import time
import types

import uvicorn
from starlette.types import ASGIApp

from dsv32_jax.serve import errors
from dsv32_jax.serve.worker import EngineWorker

logger = logging.getLogger(__name__)

FLUSH = 5  # seconds for answers that are complete but not sent


def make_config(app: ASGIApp) -> uvicorn.Config:
    """Return uvicorn's settings: no websockets, and our log in place of its own.

    Args:
        app: The application.

    Returns:
        The settings.
    """
    return uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=FLUSH,
    )


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT; a second signal ends what is running at once."""

    def __init__(self, app: ASGIApp, worker: EngineWorker, *, grace: float):
        """Prepare to serve.

        Args:
            app: The application.
            worker: Its worker.
            grace: Seconds that running requests have after a signal.
        """
        super().__init__(make_config(app))
        self._worker, self._grace = worker, grace
        self._n_signals, self._until = 0, 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for one in sockets or []:
            host, port = one.getsockname()[:2]
            logger.info("ready on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        """Take a signal."""
        del sig, frame
        self._n_signals += 1

    async def on_tick(self, counter: int) -> bool:
        """Tell, ten times a second, whether it is time to end."""
        if await super().on_tick(counter):
            return True
        if not self._n_signals:
            return False
        if not self._worker.is_draining:
            self._worker.is_draining = True
            self._until = time.monotonic() + self._grace
            n, grace = self._worker.n_live, self._grace
            logger.info("stopping: %d texts have %g s to finish, no new ones", n, grace)
        if self._worker.n_live == 0 or self._worker.failure is not None:
            return True
        if self._n_signals == 1 and time.monotonic() < self._until:
            return False
        logger.warning("stopping: %d texts are cut off", self._worker.n_live)
        self._worker.fail_all(errors.stopping())
        return True
