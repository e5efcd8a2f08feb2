"""What every HTTP request passes: the key, the size of its body, the log and the count of requests."""

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import Collection, Coroutine
from typing import Any, Never

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv32_jax.serve import errors
from dsv32_jax.serve.metrics import Metrics

logger = logging.getLogger(__name__)

HEALTH, METRICS = "/health", "/metrics"
CLIENT_LEFT = 499  # nginx's status for it; nobody receives it


class Gate:
    """Asks for the key, and counts and logs each request. An ASGI middleware."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, paths: Collection[str], metrics: Metrics
    ):
        """Wrap an application.

        Args:
            app: What answers.
            api_key: What clients must send as `Authorization: Bearer KEY`, except for /health; None asks for nothing.
            paths: Those that are counted by name.
            metrics: Where requests are counted.
        """
        self._app, self._paths, self._metrics = app, paths, metrics
        self._wanted = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun, status = time.monotonic(), 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with contextlib.suppress(ClientDisconnect):  # while the body was read
                await self._answerer(scope)(scope, receive, note)
            status = status or CLIENT_LEFT
        finally:
            status = status or 500  # it failed, which is answered outside of here
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.count(path, status)
            level = logging.DEBUG if path in (HEALTH, METRICS) else logging.INFO
            seconds = time.monotonic() - begun
            logger.log(level, "%s %s %d, %.2f s", scope["method"], path, status, seconds)

    def _answerer(self, scope: Scope) -> ASGIApp:
        if self._wanted is None or scope["path"] == HEALTH:
            return self._app
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._wanted):
            return self._app
        return error_response(
            errors.ApiError(
                401,
                "the API key is missing or wrong",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        )


def error_response(error: errors.ApiError) -> JSONResponse:
    """Return what a client gets for an error."""
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def read_json(request: Request, *, limit: int, timeout: float) -> Any:
    """Read a request's body.

    Args:
        request: The request.
        limit: Bytes that it may have.
        timeout: Seconds that it may take to arrive.

    Returns:
        The JSON.

    Raises:
        ApiError: It is too large, too slow, or no JSON.
        ClientDisconnect: The client left before its end.
    """
    try:
        async with asyncio.timeout(timeout):
            body = await _read(request, limit)
    except TimeoutError as error:
        raise errors.timed_out(timeout) from error
    return await asyncio.to_thread(_parse, body)


async def _read(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            message = f"the body has more than {limit} bytes"
            raise errors.ApiError(413, message, code="body_too_large")
    return bytes(body)


def _parse(body: bytes) -> Any:
    try:
        raw = json.loads(body, parse_constant=_no_number)
        # JSON can spell half a character, which no tokenizer can take.
        json.dumps(raw, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise errors.ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    return raw


def _no_number(name: str) -> Never:
    raise ValueError(f"{name} is not JSON")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run something that only the client is interested in, and stop it when the client leaves.

    Args:
        receive: The connection, whose request body was read.
        work: What to do.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.wait({task, watch})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
