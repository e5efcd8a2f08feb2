"""Answers that are drawn while they are sent."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from dsv32_jax.generate.protocol import TokenEvent
from dsv32_jax.serve import errors, gate, wire
from dsv32_jax.serve.answers import ChatAnswer, TextAnswer
from dsv32_jax.serve.metrics import Metrics
from dsv32_jax.serve.worker import EngineWorker, Ticket


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer to one request, whole or as server-sent events; it ends when the client leaves. An ASGI application.

    Attributes:
        streams: Whether it is sent piece by piece.
        frame: What its objects share.
        answers: The choices, with nothing in them yet.
        ticket: Where their tokens arrive.
        worker: Who draws them.
        metrics: Where delays are measured.
    """

    streams: bool
    frame: wire.Frame
    answers: Sequence[TextAnswer | ChatAnswer]
    ticket: Ticket
    worker: EngineWorker
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        try:
            work = self._stream(send) if self.streams else self._send_whole(scope, receive, send)
            await gate.while_connected(receive, work)
        finally:
            self.worker.cancel(self.ticket)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for _ in self._deltas():
            pass
        await JSONResponse(self.frame.whole(self.answers))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Send chunks; an error that comes after the first is the stream's last event."""
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunk in self._chunks():
                await _send_event(send, json.dumps(chunk))
            await _send_event(send, "[DONE]")
        except errors.ApiError as error:
            self.metrics.count_failed_stream(error.code or "")
            await _send_event(send, json.dumps(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        for chunk in self.frame.opening(len(self.answers)):
            yield chunk
        sent = [0] * len(self.answers)  # tokens whose log-probabilities the client has
        async for i, deltas, is_over in self._deltas():
            answer = self.answers[i]
            for delta in deltas:
                yield self.frame.chunk(i, delta, answer.tokens[sent[i] :])
                sent[i] = len(answer.tokens)
            if is_over:
                rest = answer.tokens[sent[i] :]
                chunk = self.frame.chunk(i, {}, rest, answer.finish_reason)
                chunk["choices"][0] |= wire.problems(answer)
                yield chunk
        for chunk in self.frame.last(self.answers):
            yield chunk

    async def _deltas(self) -> AsyncIterator[tuple[int, list[dict[str, Any]], bool]]:
        """Yield which choice has gone on, its deltas, and whether it is over now."""
        drawn_at: dict[int, float] = {}
        is_over: set[int] = set()
        while (item := await self.ticket.next()) is not None:
            if isinstance(item.event, TokenEvent):
                self.metrics.time(self.ticket, item, drawn_at.get(item.choice))
                drawn_at[item.choice] = item.at
            if item.choice in is_over:
                continue  # drawn before the engine heard of the stop string
            answer = self.answers[item.choice]
            deltas = answer.take(item.event)
            if answer.finish_reason is not None:
                is_over.add(item.choice)
            if answer.was_stopped:
                self.worker.cancel(self.ticket, item.choice)
            yield item.choice, deltas, item.choice in is_over


async def _send_event(send: Send, data: str) -> None:
    body = f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})
