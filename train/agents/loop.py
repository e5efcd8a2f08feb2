"""The loop `think, call, result, think ...` over the generation engine, token in, token out, many episodes at once.

The tokens of a context only grow: results are appended behind the sampled turn, and the engine finds the pages of what
came before, so nothing is tokenised twice and little is run twice. Where earlier reasoning is to go, for a new user
message, or the context is to be shortened, a new context begins; all of them are parts of one rollout.
"""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import numpy as np

from dsv32_jax.encoding import Message
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import FinishEvent, TokenEvent
from train.agents import context as contexts
from train.agents.attempt import Attempt, Job, Limits, failed
from train.agents.context import ContextConfig
from train.agents.forms import Form, Turn
from train.agents.process import SandboxError
from train.agents.trajectory import Trajectory
from train.rl.rollout import KeptSets, Rollout


@dataclass
class _Context:
    """Tokens that only grow."""

    tokens: list[int]
    n_prompt: int
    trainable: list[bool]
    experts: np.ndarray | None = None
    selection: np.ndarray | None = None

    @classmethod
    def of(cls, prompt: Sequence[int]) -> "_Context":
        return cls(list(prompt), len(prompt), [False] * len(prompt))

    def extend(self, tokens: Sequence[int], *, drawn: bool) -> None:
        self.tokens += tokens
        self.trainable += [drawn] * len(tokens)

    def trim(self) -> None:
        """Drop what stands behind the last token that was drawn: nothing is learned there."""
        n = max((i + 1 for i, drawn in enumerate(self.trainable) if drawn), default=0)
        del self.tokens[n:], self.trainable[n:]
        self.experts, self.selection = (
            None if kept is None else kept[:, :n] for kept in (self.experts, self.selection)
        )

    def close_turn(self, event: FinishEvent) -> None:
        """Keep what the sampler read; of earlier tokens what it read when it drew behind them."""
        self.experts = _grown(self.experts, event.experts)
        self.selection = _grown(self.selection, event.selection)


def _grown(old: np.ndarray | None, new: np.ndarray | None) -> np.ndarray | None:
    if old is None or new is None:
        return new
    kept = old.shape[1] - 1  # its last token was not run then
    return np.concatenate([old[:, :kept], new[:, kept:]], axis=1)


@dataclass
class _Player:
    """An attempt with its tokens."""

    place: int
    attempt: Attempt
    stack: contextlib.ExitStack
    open: list[_Context] = field(default_factory=list)
    log_p: list[float] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    summarises: bool = False

    @property
    def n_tokens(self) -> int:
        return sum(len(one.tokens) for one in self.open)

    def open_context(self, prompt: Sequence[int]) -> None:
        if self.open:
            self.open[-1].trim()
        self.open.append(_Context.of(prompt))


class Loop:
    """Plays episodes on an engine.

    Args:
        engine: Idle. Its `max_len` is the window. What it does not report, such as experts, the rollouts lack.
        form: How conversations are written.
        limits: What an episode may take.
        context: What happens as the window fills; None lets an episode end there.
        workers: Threads that call tools, while the engine draws for others; 0 calls them in between, so that the same
            episodes are played whenever they are.
    """

    def __init__(
        self,
        engine: Engine,
        form: Form,
        *,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        context: ContextConfig | None = None,
        workers: int = 0,
    ) -> None:
        """Keep what is given."""
        self._engine, self._form, self._limits = engine, form, limits
        self._context = context
        self._pool = ThreadPoolExecutor(workers, "tools") if workers else None
        self._players: dict[int, _Player] = {}  # by request
        self._calling: dict[Future[list[str] | None], _Player] = {}
        self._open: dict[int, _Player] = {}  # by place: whatever they wait for

    def play(self, jobs: Sequence[Job], *, version: int = 0) -> Iterator[tuple[int, Trajectory]]:
        """Play an episode of each job; those that end first come first.

        As many are open at once as the engine has slots.

        Args:
            jobs: What to attempt.
            version: Of the engine's weights, kept with the rollouts.

        Yields:
            (place in `jobs`, its trajectory).

        """
        waiting = iter(enumerate(jobs))
        more = True
        try:
            while more or self._open:
                while more and len(self._open) < self._engine.cfg.n_slots:
                    place, job = next(waiting, (-1, None))
                    if job is None:
                        more = False
                        break
                    yield from self._begin(place, job, version)
                yield from self._advance(version)
        finally:
            self._abandon()

    def _begin(self, place: int, job: Job, version: int) -> Iterator[tuple[int, Trajectory]]:
        stack = contextlib.ExitStack()
        try:
            episode = stack.enter_context(job.environment.open(job.task))
        except (SandboxError, OSError) as error:
            yield place, failed(job, error)
            return
        player = _Player(place, Attempt(job, episode, self._limits), stack)
        self._open[place] = player
        self._open_context(player, player.attempt.messages)
        yield from self._submit(player, version)

    def _advance(self, version: int) -> Iterator[tuple[int, Trajectory]]:
        """Let the engine make a step, and go on with what has come back from tools."""
        if self._engine.has_work:
            for event in self._engine.step():
                player = self._players[event.request]
                if isinstance(event, TokenEvent):
                    self._take_token(player, event)
                else:
                    del self._players[event.request]
                    yield from self._end_turn(player, event, version)
            for request, player in self._players.items():
                if player.attempt.is_late:
                    self._engine.cancel(request)
        elif self._calling:
            wait(self._calling, return_when=FIRST_COMPLETED)
        for future in [future for future in self._calling if future.done()]:
            player = self._calling.pop(future)
            yield from self._go_on(player, future.result(), version)

    def _take_token(self, player: _Player, event: TokenEvent) -> None:
        player.turn.append(event.token)
        player.log_p.append(event.log_p)
        if event.kept is not None:
            player.kept.append(event.kept)

    def _end_turn(
        self, player: _Player, event: FinishEvent, version: int
    ) -> Iterator[tuple[int, Trajectory]]:
        attempt, here = player.attempt, player.open[-1]
        here.extend(player.turn, drawn=True)
        here.close_turn(event)
        attempt.count(len(player.turn))
        if event.reason == "cancelled":
            attempt.end = "seconds"
        elif event.reason == "length":
            spent = attempt.tokens >= self._limits.tokens
            full = len(here.tokens) >= self._engine.cfg.max_len
            attempt.end = "context" if full and not spent else "tokens"
        if attempt.end is not None:
            attempt.history.append(dict(self._read(player).message))
            yield from self._finish(player, version)
            return
        turn = self._read(player)
        if player.summarises:
            player.summarises = False
            assert self._context is not None
            summary = turn.message.get("content") or ""
            attempt.history.append({"role": "assistant", "content": summary})
            attempt.restart(contexts.with_summary(attempt.messages, summary))
            self._open_context(player, attempt.messages)
            yield from self._submit(player, version)
        elif self._pool is None:
            yield from self._go_on(player, attempt.take(turn), version)
        else:
            self._calling[self._pool.submit(attempt.take, turn)] = player

    def _read(self, player: _Player) -> Turn:
        return self._form.read(player.turn, list(player.attempt.tools.values()))

    def _go_on(
        self, player: _Player, results: list[str] | None, version: int
    ) -> Iterator[tuple[int, Trajectory]]:
        """Ask for the next turn, behind the results or in a new context."""
        attempt = player.attempt
        if attempt.end is not None:
            yield from self._finish(player, version)
            return
        if results is None:  # a new user message takes the earlier reasoning out of the context
            attempt.resets += 1
            self._open_context(player, attempt.messages)
        else:
            player.open[-1].extend(self._form.results(results, player.turn), drawn=False)
            self._shorten(player)
        yield from self._submit(player, version)

    def _shorten(self, player: _Player) -> None:
        """Begin a shorter context where the window is nearly full and a strategy makes one."""
        attempt, cfg = player.attempt, self._context
        window = self._engine.cfg.max_len
        if cfg is None or len(player.open[-1].tokens) <= cfg.share * window:
            return
        if cfg.strategy == "summary":
            player.summarises = True
            asked = contexts.ask_summary(attempt.messages)
            attempt.history.append(asked[-1])
            self._open_context(player, asked)
            return
        shorter = contexts.discard(attempt.messages, cfg.strategy)
        if len(shorter) < len(attempt.messages):
            attempt.restart(shorter)
            self._open_context(player, shorter)

    def _open_context(self, player: _Player, messages: Sequence[Message]) -> None:
        tools = list(player.attempt.tools.values())
        player.open_context(self._form.encode(messages, tools).ids.tolist())

    def _submit(self, player: _Player, version: int) -> Iterator[tuple[int, Trajectory]]:
        """Have the next turn drawn; end the episode where there is no room for it."""
        attempt, here = player.attempt, player.open[-1]
        player.turn = []
        window = self._engine.cfg.max_len
        left = self._limits.tokens - attempt.tokens
        if self._limits.row is not None:
            left = min(left, self._limits.row - player.n_tokens)
        if attempt.is_late:
            attempt.end = "seconds"
        elif len(here.tokens) >= window:
            attempt.end = "context"
        elif left <= 0:
            attempt.end = "tokens"
        if attempt.end is not None:
            yield from self._finish(player, version)
            return
        drawn = attempt.job.params
        # Positions begin anew in a context, so its draws need a seed of their own.
        seed = np.random.SeedSequence([drawn.seed, len(player.open)]).generate_state(1)[0]
        params = replace(drawn, max_tokens=left, seed=int(seed))
        self._players[self._engine.submit(here.tokens, params)] = player

    def _finish(self, player: _Player, version: int) -> Iterator[tuple[int, Trajectory]]:
        del self._open[player.place]
        with player.stack:
            done = player.attempt.finish(rollout=self._rollout(player, version))
        yield player.place, done

    def _rollout(self, player: _Player, version: int) -> Rollout | None:
        """Put all contexts into one rollout; None where nothing was drawn."""
        player.open[-1].trim()
        params, parts = player.attempt.job.params, [one for one in player.open if one.tokens]
        if not parts:
            return None
        kept = None
        if player.kept and (params.top_p < 1 or params.top_k > 0):
            ends = np.cumsum([len(ids) for ids in player.kept])
            kept = KeptSets(np.concatenate(player.kept).astype(np.int32), ends)
        lengths = [len(one.tokens) for one in parts]
        return Rollout(
            tokens=np.concatenate([np.asarray(one.tokens, np.int32) for one in parts]),
            n_prompt=parts[0].n_prompt,
            log_p=np.asarray(player.log_p, np.float32),
            kept=kept,
            experts=_joined([one.experts for one in parts]),
            temperature=params.temperature,
            reason="stop" if player.attempt.end == "answer" else "length",
            version=version,
            selection=_joined([one.selection for one in parts]),
            trainable=np.concatenate([np.asarray(one.trainable, bool) for one in parts]),
            starts=(0, *np.cumsum(lengths)[:-1].tolist()),
        )

    def _abandon(self) -> None:
        """Close what is open, should the caller have had enough."""
        for request in self._players:
            self._engine.cancel(request)
        if self._pool is not None and self._calling:
            wait(self._calling)
        for player in self._open.values():
            player.stack.close()
        while self._players and self._engine.has_work:
            self._engine.step()
        self._players, self._calling, self._open = {}, {}, {}

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Join what is kept of the tokens of each context."""
    there = [part for part in parts if part is not None]
    return np.concatenate(there, axis=1) if len(there) == len(parts) else None


def play_all(loop: Loop, jobs: Sequence[Job], *, version: int = 0) -> list[Trajectory]:
    """Play an episode of each job, and return them in the order of the jobs."""
    found = dict(loop.play(jobs, version=version))
    return [found[i] for i in range(len(jobs))]
