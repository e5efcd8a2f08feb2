"""The loop over any OpenAI-compatible endpoint: chat completions with tools, reasoning kept within a user's turn."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsv32_jax.config import require
from dsv32_jax.encoding import Message
from dsv32_jax.errors import UsageError
from train.agents import context as contexts
from train.agents.attempt import Attempt, Job, Limits, failed
from train.agents.context import ContextConfig
from train.agents.forms import Turn
from train.agents.process import SandboxError
from train.agents.tools import Tool
from train.agents.trajectory import Trajectory
from train.rl.outage import Outage, RequestError


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Where a model is served.

    Attributes:
        base_url: Of the endpoint, such as http://localhost:8000/v1.
        model: As the endpoint calls it.
        api_key_env: Environment variable that holds the key; "" sends none.
        window: Tokens that the model's context holds, for context management; None where nothing is to be managed.
        concurrency: Episodes at once.
        attempts: Failures to bear on one request while others succeed.
        timeout_s: Seconds that one may take.
        give_up_s: Seconds the endpoint may be down before the run stops; None waits without end.
    """

    base_url: str
    model: str
    api_key_env: str = ""
    window: int | None = None
    concurrency: int = 8
    attempts: int = 3
    timeout_s: float = 600.0
    give_up_s: float | None = 600.0

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("base_url", "model"):
            require(bool(getattr(self, name)), f"{name}='' must not be empty")
        for name in ("concurrency", "attempts", "timeout_s"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        for name in ("window", "give_up_s"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name}={value} must be positive, or None")


class _Reply(NamedTuple):
    message: dict[str, Any]
    finish: str
    written: int  # tokens
    total: int  # of the context


def without_old_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Take the reasoning out of what stands before the last user message."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [
        {k: v for k, v in message.items() if k != "reasoning_content"} if i < last else message
        for i, message in enumerate(messages)
    ]


class EndpointLoop:
    """Plays episodes with a model behind an endpoint; a context manager.

    Args:
        cfg: Where it is.
        limits: What an episode may take; `row` means nothing here.
        context: What happens as the window fills.
        should_stop: Asked while the endpoint is down; True ends the wait.

    Raises:
        UsageError: If the package `openai` or the key is missing, or a context is to be managed without a window.
    """

    def __init__(
        self,
        cfg: EndpointConfig,
        *,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        context: ContextConfig | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect to nothing yet."""
        try:
            import openai
        except ImportError as error:
            raise UsageError(
                f"an endpoint needs `pip install 'dsv32-jax[rl]'` ({error})"
            ) from error
        key = os.environ.get(cfg.api_key_env, "") if cfg.api_key_env else "none"
        if not key:
            raise UsageError(f"the endpoint's key is missing: set the variable {cfg.api_key_env}")
        if context is not None and cfg.window is None:
            raise UsageError("to manage the context the endpoint's window must be given")
        self._cfg, self._limits, self._context = cfg, limits, context
        self._client = openai.OpenAI(
            base_url=cfg.base_url, api_key=key, timeout=cfg.timeout_s, max_retries=0
        )
        self._outage = Outage(
            "the endpoint",
            cfg.base_url,
            model=cfg.model,
            attempts=cfg.attempts,
            give_up_s=cfg.give_up_s,
            should_stop=should_stop,
        )

    def __enter__(self) -> "EndpointLoop":
        """Return the loop."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._client.close()

    def play(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Trajectory]]:
        """Play an episode of each job; those that end first come first.

        Args:
            jobs: What to attempt; of their sampling `temperature`, `top_p` and `seed` are sent.

        Yields:
            (place in `jobs`, its trajectory).

        Raises:
            WorkFailedError: If the endpoint refuses every request (key, model), or is down for too long.
        """
        waiting = iter(enumerate(jobs))
        running: dict[Future[Trajectory], int] = {}
        with ThreadPoolExecutor(self._cfg.concurrency, "episodes") as pool:
            try:
                while True:
                    while len(running) < self._cfg.concurrency:
                        place, job = next(waiting, (-1, None))
                        if job is None:
                            break
                        running[pool.submit(self._attempt, job)] = place
                    if not running:
                        return
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield running.pop(future), future.result()
            finally:
                for future in running:
                    future.cancel()

    def _attempt(self, job: Job) -> Trajectory:
        with contextlib.ExitStack() as stack:
            try:
                episode = stack.enter_context(job.environment.open(job.task))
            except (SandboxError, OSError) as error:
                return failed(job, error)
            attempt = Attempt(job, episode, self._limits)
            note = ""
            try:
                while attempt.end is None:
                    self._turn(attempt)
            except RequestError as error:
                attempt.end, note = "refused", str(error)
            return attempt.finish(note=note)

    def _turn(self, attempt: Attempt) -> None:
        tools = list(attempt.tools.values())
        reply = self._ask(attempt, without_old_reasoning(attempt.messages), tools)
        if attempt.is_late:
            attempt.end = "seconds"
        elif reply.finish == "length":
            spent = attempt.tokens >= self._limits.tokens
            attempt.end = "tokens" if spent else "context"
        if attempt.end is not None:
            attempt.history.append(reply.message)
            return
        if attempt.take(Turn(reply.message, ())) is not None and attempt.end is None:
            self._shorten(attempt, reply.total)

    def _shorten(self, attempt: Attempt, total: int) -> None:
        """Go on from a shorter conversation where the window is nearly full."""
        cfg = self._context
        if cfg is None or total <= cfg.share * (self._cfg.window or 0):
            return
        if cfg.strategy == "summary":
            asked = contexts.ask_summary(attempt.messages)
            attempt.history.append(asked[-1])
            reply = self._ask(attempt, without_old_reasoning(asked), ())
            attempt.history.append(reply.message)
            attempt.restart(contexts.with_summary(attempt.messages, reply.message["content"]))
            return
        shorter = contexts.discard(attempt.messages, cfg.strategy)
        if len(shorter) < len(attempt.messages):
            attempt.restart(shorter)

    def _ask(self, attempt: Attempt, messages: Sequence[Message], tools: Sequence[Tool]) -> _Reply:
        left = self._limits.tokens - attempt.tokens
        sent = _with_ids(messages)
        reply = self._outage.ride_out(lambda: self._request(attempt.job, sent, tools, left))
        attempt.count(reply.written)
        return reply

    def _request(
        self, job: Job, messages: list[dict[str, Any]], tools: Sequence[Tool], left: int
    ) -> _Reply:
        """Send one request; errors that say the endpoint is down go to the caller."""
        where = f"the endpoint at {self._cfg.base_url}"
        options: dict[str, Any] = {"tools": [tool.schema for tool in tools]} if tools else {}
        answer = self._client.chat.completions.create(
            model=self._cfg.model,
            messages=messages,  # type: ignore[arg-type]
            temperature=job.params.temperature,
            top_p=job.params.top_p,
            seed=job.params.seed,
            max_tokens=left,
            **options,
        )
        if not answer.choices or answer.usage is None:
            raise RequestError(f"{where} answers without a choice, or without counting tokens")
        (choice, *_) = answer.choices
        usage = answer.usage
        return _Reply(
            _message(choice.message),
            choice.finish_reason or "stop",
            usage.completion_tokens,
            usage.total_tokens,
        )


def _message(said: Any) -> dict[str, Any]:
    """Return a reply as a message of this project."""
    calls = [
        {
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in said.tool_calls or ()
        if call.type == "function"
    ]
    reasoning = getattr(said, "reasoning_content", None)
    message: dict[str, Any] = {"role": "assistant", "content": said.content or ""}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _with_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Number calls and results, as endpoints want them; arguments that are no JSON object are sent as none."""
    sent: list[dict[str, Any]] = []
    ids: list[str] = []
    for i, message in enumerate(messages):
        copy = dict(message)
        if message["role"] == "tool":
            copy["tool_call_id"] = ids.pop(0)
        elif message.get("tool_calls"):
            ids = [f"call_{i}_{j}" for j, _ in enumerate(message["tool_calls"])]
            copy["tool_calls"] = [
                {**call, "id": name, "function": _sendable(call["function"])}
                for name, call in zip(ids, message["tool_calls"], strict=True)
            ]
        sent.append(copy)
    return sent


def _sendable(function: Mapping[str, str]) -> dict[str, str]:
    try:
        good = isinstance(json.loads(function["arguments"]), dict)
    except (ValueError, RecursionError):
        good = False
    return dict(function) if good else {"name": function["name"], "arguments": "{}"}
