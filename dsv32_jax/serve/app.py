"""The endpoints."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence

import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dsv32_jax.encoding.errors import EncodingError
from dsv32_jax.encoding.tokens import SpecialTokens, encode_to_tokens
from dsv32_jax.serve import errors, gate, reply, schema, wire
from dsv32_jax.serve.answers import ChatAnswer, TextAnswer
from dsv32_jax.serve.config import ServeConfig
from dsv32_jax.serve.metrics import Metrics
from dsv32_jax.serve.worker import EngineWorker
from dsv32_jax.tokenizer import Tokenizer


def make_app(cfg: ServeConfig, worker: EngineWorker, tokenizer: Tokenizer) -> Starlette:
    """Make the ASGI application; its lifespan is that of the worker's thread.

    Args:
        cfg: How to answer.
        worker: Not started yet.
        tokenizer: The model's.

    Returns:
        The application.
    """
    metrics = Metrics(worker)
    service = Service(cfg, worker, tokenizer, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        worker.start()
        yield
        await worker.close()

    routes = [
        Route(gate.HEALTH, service.health),
        Route(gate.METRICS, service.metrics),
        Route("/v1/models", service.models),
        Route("/v1/models/{model:path}", service.models),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.complete, methods=["POST"]),
    ]
    paths = {route.path for route in routes}
    return Starlette(
        routes=routes,
        middleware=[Middleware(gate.Gate, api_key=cfg.api_key, paths=paths, metrics=metrics)],
        exception_handlers={
            errors.ApiError: _on_api_error,
            HTTPException: _on_http_error,
            Exception: _on_mistake,
        },
        lifespan=lifespan,
    )


class Service:
    """Answers requests."""

    def __init__(
        self, cfg: ServeConfig, worker: EngineWorker, tokenizer: Tokenizer, metrics: Metrics
    ):
        """Keep what answers need."""
        self._cfg, self._worker, self._metrics = cfg, worker, metrics
        self._tokenizer = tokenizer
        # A tokenizer may end texts with another token than the chat format does.
        self._chat_end = SpecialTokens.from_tokenizer(tokenizer).eos

    async def health(self, request: Request) -> Response:
        """Say whether completions can be asked for."""
        del request
        if self._worker.failure is not None:
            error = f"{type(self._worker.failure).__name__}: {self._worker.failure}"
            return JSONResponse({"status": "failed", "error": error}, 503)
        if self._worker.is_draining:
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Give the figures."""
        del request
        kind = prometheus_client.CONTENT_TYPE_LATEST
        return Response(self._metrics.text(), headers={"content-type": kind})

    async def models(self, request: Request) -> Response:
        """List the one model, or show it.

        Raises:
            ApiError: Another one is asked for.
        """
        name = self._cfg.model
        card = {"id": name, "object": "model", "created": 0, "owned_by": "dsv32_jax"}
        asked = request.path_params.get("model")
        if asked is None:
            return JSONResponse({"object": "list", "data": [card]})
        if asked != name:
            raise errors.ApiError(404, f"there is no model {asked!r}", code="model_not_found")
        return JSONResponse(card)

    async def chat(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        raw = await gate.read_json(request, limit=self._cfg.max_body, timeout=self._cfg.timeout)
        ask = schema.read_chat(raw, model=self._cfg.model, thinking=self._cfg.thinking)
        return self._answer(ask, await asyncio.to_thread(self._encode_chat, ask))

    async def complete(self, request: Request) -> ASGIApp:
        """Continue a text."""
        raw = await gate.read_json(request, limit=self._cfg.max_body, timeout=self._cfg.timeout)
        ask = schema.read_text(raw, model=self._cfg.model)
        return self._answer(ask, await asyncio.to_thread(self._encode_text, ask))

    def _encode_chat(self, ask: schema.ChatAsk) -> list[int]:
        try:
            encoded = encode_to_tokens(
                ask.messages,
                self._tokenizer,
                thinking_mode="thinking" if ask.thinking else "chat",
                tools_block=self._cfg.tools_block,
                response_format_block=self._cfg.response_format_block,
            )
        except EncodingError as error:
            raise errors.invalid("messages", str(error)) from error
        return encoded.ids.tolist()

    def _encode_text(self, ask: schema.TextAsk) -> list[int]:
        if not isinstance(ask.prompt, str):
            return list(ask.prompt)
        bos = self._tokenizer.bos_id
        return ([] if bos is None else [bos]) + self._tokenizer.encode(ask.prompt)

    def _answer(self, ask: schema.ChatAsk | schema.TextAsk, prompt: list[int]) -> ASGIApp:
        self._check_prompt(prompt)
        if len(ask.params) > self._worker.capacity:
            raise errors.invalid("n", f"n={len(ask.params)} is above {self._worker.capacity}")
        frame = wire.Frame(
            model=self._cfg.model,
            chat=isinstance(ask, schema.ChatAsk),
            n_prompt=len(prompt),
            logprobs=ask.logprobs,
            include_usage=ask.include_usage,
        )
        stop_ids = (self._chat_end,) if frame.chat else ()
        params = [dataclasses.replace(one, stop_ids=stop_ids) for one in ask.params]
        ends = frozenset({self._tokenizer.eos_id, *stop_ids})
        texts = [
            TextAnswer(self._tokenizer, ends=ends, stop=ask.stop, keeps_tokens=ask.logprobs)
            for _ in params
        ]
        ticket = self._worker.submit(prompt, params, timeout=self._cfg.timeout)
        answers: Sequence[TextAnswer | ChatAnswer] = texts
        if isinstance(ask, schema.ChatAsk):
            answers = [ChatAnswer(text, thinking=ask.thinking) for text in texts]
        return reply.Reply(
            streams=ask.stream,
            frame=frame,
            answers=answers,
            ticket=ticket,
            worker=self._worker,
            metrics=self._metrics,
        )

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise errors.invalid("prompt", "prompt must have at least one token")
        most = min(self._cfg.max_prompt, self._worker.max_len - 1)
        if len(prompt) > most:
            message = f"the prompt has {len(prompt)} tokens; it must have at most {most}"
            raise errors.ApiError(400, message, code="context_length_exceeded")
        if not all(0 <= token < self._worker.vocab_size for token in prompt):
            rule = f"must be token ids in [0, {self._worker.vocab_size})"
            raise errors.invalid("prompt", f"prompt {rule}")


async def _on_api_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, errors.ApiError)
    return gate.error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "method_not_allowed" if error.status_code == 405 else "no_endpoint"
    headers = dict(error.headers or {})
    return gate.error_response(
        errors.ApiError(error.status_code, message, code=code, headers=headers)
    )


async def _on_mistake(request: Request, error: Exception) -> Response:
    """Answer where we have made a mistake; Starlette raises the error again, for the log."""
    del request
    message = f"unexpected {type(error).__name__}"
    headers = {"connection": "close"}  # as uvicorn then closes it
    return gate.error_response(errors.ApiError(500, message, kind="server_error", headers=headers))
