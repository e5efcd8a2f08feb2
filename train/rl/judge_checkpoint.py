"""A judge whose model is a checkpoint that runs in this process, on an engine of its own."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax

from dsv32_jax import load_model, sharding
from dsv32_jax.cache import CacheConfig
from dsv32_jax.convert import storage
from dsv32_jax.encoding import SpecialTokens, encode_to_tokens
from dsv32_jax.errors import UsageError, WorkFailedError
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig, FinishEvent
from dsv32_jax.generate.sampling import SamplingParams
from dsv32_jax.serve.answers import ChatAnswer, TextAnswer
from dsv32_jax.tokenizer import Tokenizer
from train.rl.judge import JudgeConfig, JudgeError, Reply, temperature_of
from train.rl.outage import POLL_S

PAGE_SIZE = 64
MAX_WAITING = 1 << 16  # more than threads ask at once


class _Asked(NamedTuple):
    """A request on its way through the engine."""

    prompt: Sequence[int]
    params: SamplingParams
    answer: ChatAnswer
    reply: Future[Reply]


class Checkpoint:
    """A model loaded from a folder; implements `judge.Model`.

    Args:
        cfg: How it judges.
        folder: Where it lies, `cfg.checkpoint`.
        should_stop: Asked while waiting for a reply; True ends the wait.

    Raises:
        UsageError: If there is no such model, or its tokenizer does not fit it.
    """

    def __init__(self, cfg: JudgeConfig, folder: str, should_stop: Callable[[], bool]) -> None:
        """Load the model and start the engine's thread."""
        self._cfg, self._should_stop = cfg, should_stop
        try:
            self._engine, self._tokenizer = _load(cfg, folder)
        except (ValueError, OSError) as error:
            raise UsageError(f"rewards.judge.checkpoint={folder}: {error}") from error
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise WorkFailedError(
                f"the judge {folder} does not fit into memory beside the policy: lower rewards.judge.concurrency or"
                " max_len, or spread it by rewards.judge.mesh"
            ) from error
        self._end = SpecialTokens.from_tokenizer(self._tokenizer).eos
        self._requests: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="judge", daemon=True)
        self._thread.start()

    def reply(self, messages: list[dict[str, str]], attempt: int, most: int) -> Reply:
        """Answer messages; `most` is not needed, as tokens are counted.

        Args:
            messages: A system's and a user's.
            attempt: Counted from 0; the seed.
            most: Unused.

        Returns:
            The reply.

        Raises:
            JudgeError: If the messages do not fit, or the reply takes too long.
            WorkFailedError: If the engine has failed or the run is to stop.
        """
        del most
        mode = "thinking" if self._cfg.thinking else "chat"
        prompt = encode_to_tokens(messages, self._tokenizer, thinking_mode=mode).ids.tolist()
        room = self._cfg.max_len - self._cfg.max_tokens
        if len(prompt) > room:
            raise JudgeError(
                f"the judge's prompt has {len(prompt)} tokens, and max_len={self._cfg.max_len} less"
                f" max_tokens={self._cfg.max_tokens} leaves {room}"
            )
        params = SamplingParams(
            temperature=temperature_of(self._cfg, attempt),
            seed=attempt,
            max_tokens=self._cfg.max_tokens,
            stop_ids=(self._end,),
        )
        ends = frozenset({self._end, self._tokenizer.eos_id})
        text = TextAnswer(self._tokenizer, ends=ends, stop=(), keeps_tokens=False)
        answer = ChatAnswer(text, thinking=self._cfg.thinking)
        asked = _Asked(prompt, params, answer, Future())
        self._requests.put(asked)
        return self._wait(asked.reply)

    def close(self) -> None:
        """End the engine after the step it is in."""
        self._requests.put(None)
        self._thread.join()

    def _wait(self, reply: Future[Reply]) -> Reply:
        until = time.monotonic() + self._cfg.timeout_s
        while True:
            try:
                return reply.result(POLL_S)
            except TimeoutError:
                pass
            if self._failure is not None:
                raise WorkFailedError(f"the judge's engine failed: {self._failure}")
            if self._should_stop():
                reply.cancel()
                raise WorkFailedError("the run was stopped while it waited for the judge")
            if time.monotonic() > until and reply.cancel():
                raise JudgeError(f"the judge gave no reply within {self._cfg.timeout_s:g} s")

    def _run(self) -> None:
        """Be the thread: take requests between steps, and sleep when there is nothing to do."""
        try:
            self._draw()
        except Exception as error:  # noqa: BLE001 - who waits says it
            self._failure = error

    def _draw(self) -> None:
        asked: dict[int, _Asked] = {}
        while True:
            while not (self._engine.has_work and self._requests.empty()):
                request = self._requests.get()
                if request is None:
                    return
                asked[self._engine.submit(request.prompt, request.params)] = request
            for number, one in asked.items():
                if one.reply.cancelled():
                    self._engine.cancel(number)
            for event in self._engine.step():
                one = asked[event.request]
                if isinstance(event, FinishEvent):
                    del asked[event.request]
                if not one.reply.cancelled():
                    one.answer.take(event)
                    if isinstance(event, FinishEvent) and one.reply.set_running_or_notify_cancel():
                        one.reply.set_result(_reply(one))


def _reply(asked: _Asked) -> Reply:
    answer = asked.answer
    text = answer.message()["content"] or ""
    return Reply(text, answer.finish_reason == "stop", len(asked.prompt) + answer.n_tokens)


def _load(cfg: JudgeConfig, folder: str) -> tuple[Engine, Tokenizer]:
    """Load model and tokenizer, and lay out a cache for as many replies as are asked for at once."""
    where = storage.locate(folder)
    tokenizer = load_model.load_tokenizer_of(where)
    first = jax.local_devices()[:1]
    mesh = sharding.make_mesh(
        cfg.mesh or sharding.MeshConfig(), jax.local_devices() if cfg.mesh else first
    )
    model = load_model.load_model(where, load_model.saved_dtype(where), mesh=mesh, narrow=True)
    if tokenizer.vocab_size > model.cfg.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.cfg.vocab_size}"
        )
    pages = -(-(cfg.max_len + 1) // PAGE_SIZE)
    settings = EngineConfig(
        n_slots=cfg.concurrency,
        max_len=cfg.max_len,
        max_waiting=MAX_WAITING,
        cache=CacheConfig(n_pages=cfg.concurrency * pages, page_size=PAGE_SIZE),
    )
    return Engine(model, settings, eos_id=tokenizer.eos_id, mesh=mesh), tokenizer
