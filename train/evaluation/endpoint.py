"""Episodes played by a model behind an OpenAI-compatible endpoint, many at once."""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

from dsv32_jax.encoding import Message
from dsv32_jax.errors import UsageError, WorkFailedError
from train.agents import context as contexts
from train.agents.attempt import Attempt, Job, Limits, failed
from train.agents.context import ContextConfig
from train.agents.forms import Turn
from train.agents.process import SandboxError
from train.agents.trajectory import Trajectory

RETRIES = 8  # by the client, with growing pauses of at most 8 s


class Answer(NamedTuple):
    """What an endpoint said.

    Attributes:
        message: The assistant message.
        cut: Whether it ended at a limit of tokens.
        written: Tokens that the model wrote.
        context: Tokens of prompt and answer.
    """

    message: dict[str, Any]
    cut: bool
    written: int
    context: int


class EndpointLoop:
    """Plays episodes through chat completions; as `agents.loop.Loop` does on the engine.

    Args:
        base_url: Of the endpoint, such as http://localhost:8000/v1.
        model: As the endpoint calls it.
        limits: What an episode may take.
        context: What happens as the window fills; None lets an episode end there.
        window: Tokens of a context.
        thinking: Ask for reasoning, or for none; None says nothing of it.
        concurrency: Episodes at once.
        timeout_s: Seconds that a request may take.
        api_key_env: Environment variable that holds the key; "" sends none.

    Raises:
        UsageError: If the package `openai` or the key is missing.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        limits: Limits,
        context: ContextConfig | None = None,
        window: int = 131_072,
        thinking: bool | None = None,
        concurrency: int = 8,
        timeout_s: float = 600.0,
        api_key_env: str = "",
    ) -> None:
        """Connect to nothing yet."""
        try:
            import openai
        except ImportError as error:
            raise UsageError(
                f"an endpoint needs `pip install 'dsv32-jax[rl]'` ({error})"
            ) from error
        key = os.environ.get(api_key_env, "") if api_key_env else "none"
        if not key:
            raise UsageError(f"the endpoint's key is missing: set the variable {api_key_env}")
        self._client = openai.OpenAI(
            base_url=base_url, api_key=key, timeout=timeout_s, max_retries=RETRIES
        )
        self._where, self._model = base_url, model
        self._limits, self._context, self._window = limits, context, window
        self._thinking = thinking
        self._concurrency = concurrency
        self._stop = threading.Event()

    def play(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Trajectory]]:
        """Play an episode of each job; those that end first come first.

        Args:
            jobs: What to attempt.

        Yields:
            (place in `jobs`, its trajectory).

        Raises:
            WorkFailedError: If the endpoint refuses every request, or is down for longer than retries bridge.
        """
        self._stop.clear()
        with ThreadPoolExecutor(self._concurrency, "endpoint") as pool:
            futures = {pool.submit(self._play, job): place for place, job in enumerate(jobs)}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:
                self._stop.set()  # so that episodes under way end with their present turn
                for future in futures:
                    future.cancel()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _play(self, job: Job) -> Trajectory:
        with contextlib.ExitStack() as stack:
            try:
                episode = stack.enter_context(job.environment.open(job.task))
            except (SandboxError, OSError) as error:
                return failed(job, error)
            attempt = Attempt(job, episode, self._limits)
            note = ""
            while attempt.end is None:
                note = self._take_turn(attempt)
            return attempt.finish(note=note)

    def _take_turn(self, attempt: Attempt) -> str:
        """Ask for a turn and go on with it; return why the conversation was refused, if it was."""
        import openai

        if self._stop.is_set():
            raise WorkFailedError("the evaluation was stopped")
        left = self._limits.tokens - attempt.tokens
        if attempt.is_late or left <= 0:
            attempt.end = "seconds" if attempt.is_late else "tokens"
            return ""
        tools = [tool.schema for tool in attempt.tools.values()]
        try:
            answer = self._ask(attempt, attempt.messages, tools, left)
            attempt.count(answer.written)
            if answer.cut:
                attempt.history.append(answer.message)
                attempt.end = "tokens" if attempt.tokens >= self._limits.tokens else "context"
            elif attempt.take(Turn(answer.message, ())) is not None and attempt.end is None:
                self._shorten(attempt, answer.context)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            attempt.end = "refused"
            return str(error)
        return ""

    def _shorten(self, attempt: Attempt, tokens: int) -> None:
        """Begin a shorter context where the window is nearly full and a strategy makes one."""
        cfg = self._context
        if cfg is None or tokens <= cfg.share * self._window:
            return
        if cfg.strategy != "summary":
            shorter = contexts.discard(attempt.messages, cfg.strategy)
            if len(shorter) < len(attempt.messages):
                attempt.restart(shorter)
            return
        asked = contexts.ask_summary(attempt.messages)
        attempt.history.append(asked[-1])
        left = self._limits.tokens - attempt.tokens
        answer = self._ask(attempt, asked, [], left)
        attempt.count(answer.written)
        summary = answer.message.get("content") or ""
        attempt.history.append({"role": "assistant", "content": summary})
        attempt.restart(contexts.with_summary(attempt.messages, summary))

    def _ask(
        self,
        attempt: Attempt,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        max_tokens: int,
    ) -> Answer:
        """Send one request."""
        import openai

        params = attempt.job.params
        extra: dict[str, Any] = {"top_k": params.top_k} if params.top_k else {}
        if self._thinking is not None:
            extra["thinking"] = {"type": "enabled" if self._thinking else "disabled"}
        given: dict[str, Any] = {"tools": tools} if tools else {}
        try:
            found = self._client.chat.completions.create(
                model=self._model,
                messages=with_ids(messages),  # type: ignore[arg-type]
                temperature=params.temperature,
                top_p=params.top_p,
                seed=(params.seed + attempt.steps) % 2**31,
                max_tokens=max_tokens,
                extra_body=extra,
                **given,
            )
        except (openai.BadRequestError, openai.UnprocessableEntityError):
            raise
        except openai.APIError as error:
            raise WorkFailedError(f"the endpoint at {self._where} fails: {error}") from error
        if not found.choices or found.usage is None:
            raise WorkFailedError(f"the endpoint at {self._where} answers without choice or usage")
        (choice, *_) = found.choices
        message = {
            name: value
            for name, value in choice.message.model_dump(exclude_none=True).items()
            if name in ("role", "content", "reasoning_content", "tool_calls") and value
        }
        usage = found.usage
        return Answer(
            {"content": ""} | message,
            choice.finish_reason == "length",
            usage.completion_tokens,
            usage.total_tokens,
        )


def with_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Write messages as endpoints want them: calls have ids, results name them, earlier turns have no reasoning.

    Args:
        messages: The conversation, each result behind its calls in order.

    Returns:
        The same to be sent.
    """
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    found: list[dict[str, Any]] = []
    waiting: list[str] = []
    for i, message in enumerate(messages):
        sent = dict(message)
        if users and i < users[-1]:
            sent.pop("reasoning_content", None)
        if message["role"] == "tool":
            sent["tool_call_id"] = waiting.pop(0)
        elif message.get("tool_calls"):
            waiting = [f"call_{i}_{j}" for j in range(len(message["tool_calls"]))]
            sent["tool_calls"] = [
                {"type": "function", "function": call["function"], "id": name}
                for call, name in zip(message["tool_calls"], waiting, strict=True)
            ]
        found.append(sent)
    return found
