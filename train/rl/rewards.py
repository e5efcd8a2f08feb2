"""Rewards of responses: components, their weights in each domain, and what to do where there is no reward."""

import importlib.util
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, get_args

from dsv32_jax.config import require
from dsv32_jax.convert.storage import Location
from dsv32_jax.errors import UsageError, WorkFailedError
from train.agents import isolation
from train.agents.process import SandboxError
from train.rl import answer, fence, language, verifiers
from train.rl.code import CodeConfig, CodeJudge
from train.rl.judge import Judge, JudgeConfig, JudgeError
from train.rl.pool import LocalWorkers, Pool, WorkerError, Workers
from train.rl.tasks import Task

Component = Literal["correct", "format", "length", "language", "judge", "custom"]
Fault = Literal["hung", "killed", "raised", "not_a_number", "unjudged", "sandbox", "cut"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
ANY_DOMAIN = "*"
LEDGER_FILE = "judge.jsonl"
EQUAL = 1e-6  # rewards of a group within this are all equal: it teaches nothing
POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What each component counts for in one domain; a reward is the weighted sum.

    Attributes:
        domain: Of the tasks this is for; "*" is for those that no other names.
        correct: The task's verifier says so, 0 to 1.
        format: The response keeps to the format, 0 or 1.
        length: 0 for responses up to `LengthConfig.free`, falling to -1. 0 leaves the penalty out.
        language: Share of words in the prompt's language, 0 to 1.
        judge: The score of the generative reward model, 0 to 1.
        custom: Whatever the function of one's own returns.
    """

    domain: str = ANY_DOMAIN
    correct: float = 1.0
    format: float = 0.0
    length: float = 0.0
    language: float = 0.0
    judge: float = 0.0
    custom: float = 0.0

    def __post_init__(self) -> None:
        """Check that something counts, and finitely."""
        weights = self.by_component()
        for name, weight in weights.items():
            require(
                math.isfinite(weight), f"weights of {self.domain}: {name}={weight} must be finite"
            )
        require(
            any(weights.values()), f"weights of {self.domain}: all are 0, so nothing is rewarded"
        )

    def by_component(self) -> dict[str, float]:
        """Return component -> weight."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "domain"}

    @classmethod
    def from_text(cls, text: str) -> "Weights":
        """Read weights off a command line.

        Args:
            text: The domain and weights behind colons, such as `math:correct=1:format=0.1`.

        Returns:
            The weights; components that are not named keep their defaults.

        Raises:
            ValueError: If it is not written so.
        """
        domain, *pairs = text.split(":")
        known = [f.name for f in fields(cls) if f.name != "domain"]
        found = {}
        for pair in pairs:
            name, equals, value = pair.partition("=")
            right = bool(equals) and name in known
            require(right, f"{text}: {pair!r} must be component=weight, of {', '.join(known)}")
            try:
                found[name] = float(value)
            except ValueError:
                raise ValueError(f"{text}: {name}={value} must be a number") from None
        return cls(domain=domain, **found)


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """Where the length penalty begins and ends; DeepSeek has not published its form.

    Attributes:
        free: Tokens of a response that cost nothing.
        limit: Tokens from which on the penalty is whole; between the two it grows evenly.
    """

    free: int
    limit: int

    def __post_init__(self) -> None:
        """Check the order."""
        require(0 <= self.free < self.limit, f"free={self.free} must be below limit={self.limit}")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How responses are rewarded.

    Attributes:
        weights: Of each domain.
        style: The format that responses should have, see `answer.read`.
        length: The length penalty's range; None for no penalty, as Speciale was trained with less of it.
        cut: What a response that ended at the limit of tokens is: "fail" has no answer and no format, "drop" has no
            reward, so that it is not trained on.
        custom: A function of one's own, `FILE.py:NAME`, called with (task, text, tokens) and returning a number.
        judge: The generative reward model; None for none.
        code: How programs are run that tasks test.
        workers: Processes that rules and the function of one's own run in.
        ray: HOST:PORT of the head of a Ray cluster that this machine belongs to: these processes run on its machines.
            None runs them here, and needs no server.
        timeout_s: Seconds that these may take for one response.
        memory_mib: That these may take.
        max_fault_share: Share of responses that may come without a reward, cut ones apart, before the run stops.
    """

    weights: tuple[Weights, ...] = (Weights(),)
    style: answer.Style = "tags"
    length: LengthConfig | None = None
    cut: Literal["fail", "drop"] = "fail"
    custom: str | None = None
    judge: JudgeConfig | None = None
    code: CodeConfig = CodeConfig()
    workers: int = 2
    ray: str | None = None
    timeout_s: float = 30.0
    memory_mib: int = 2048
    max_fault_share: float = 0.25

    def __post_init__(self) -> None:
        """Check that what counts is there, and what is there counts."""
        domains = [weights.domain for weights in self.weights]
        require(bool(domains), "weights=() rewards nothing")
        twice = [domain for domain, n in Counter(domains).items() if n > 1]
        require(not twice, f"weights of {', '.join(twice)} are given twice")
        for name in ("length", "custom", "judge"):
            counts = any(getattr(weights, name) for weights in self.weights)
            given = getattr(self, name) is not None
            require(given or not counts, f"a weight of {name} is not 0, but rewards.{name} is None")
            require(
                counts or not given, f"rewards.{name} is set, but its weight is 0 in each domain"
            )
        require(self.workers >= 1, f"workers={self.workers} must be at least 1")
        require(
            self.ray is None or re.fullmatch(r"[^:/]+:[0-9]{1,5}", self.ray) is not None,
            f"ray={self.ray} must be HOST:PORT of a Ray cluster's head, or None",
        )
        require(self.timeout_s > 0, f"timeout_s={self.timeout_s} must be positive")
        require(self.memory_mib >= 64, f"memory_mib={self.memory_mib} must be at least 64")
        share = self.max_fault_share
        require(0 <= share <= 1, f"max_fault_share={share} must be in [0, 1]")

    def weights_of(self, domain: str) -> Weights:
        """Return a domain's weights.

        Args:
            domain: Of a task.

        Returns:
            Its own, or those of "*".

        Raises:
            UsageError: If there are neither.
        """
        found = {weights.domain: weights for weights in self.weights}
        weights = found.get(domain, found.get(ANY_DOMAIN))
        if weights is None:
            raise UsageError(
                f"there are no weights for the domain {domain!r}; it needs its own or '*'"
            )
        return weights


class Response(NamedTuple):
    """What a policy answered.

    Attributes:
        text: Special tokens spelled out, see `dsv32_jax.encoding.decode_text`.
        n_tokens: Drawn.
        cut: Whether it ended at the limit of tokens.
    """

    text: str
    n_tokens: int
    cut: bool


class Scored(NamedTuple):
    """A response's reward.

    Attributes:
        total: None where there is no reward: the response must not be trained on.
        components: Each on its own, before its weight; those that were computed.
        fault: Why there is no reward; None where there is.
        message: What happened, for people.
    """

    total: float | None
    components: Mapping[str, float]
    fault: Fault | None = None
    message: str = ""


def require_scorable(cfg: RewardConfig, tasks: Iterable[Task]) -> None:
    """Refuse tasks that the config can not reward.

    Args:
        cfg: How responses are rewarded.
        tasks: The tasks.

    Raises:
        UsageError: If one has no verifier where correctness counts, no rubric where the judge does, or no weights; if
            one tests programs and there is no isolation here to run them in.
    """
    for task in tasks:
        if task.verifier == "code":
            isolation.require_isolation(unsafe_local=cfg.code.unsafe_local)
        weights = cfg.weights_of(task.domain)
        if weights.correct and task.verifier is None:
            raise UsageError(
                f"task {task.name} has no verifier, but correct={weights.correct:g} counts"
            )
        if weights.judge and not task.rubric:
            raise UsageError(f"task {task.name} has no rubric, but judge={weights.judge:g} counts")


def measure(
    cfg: RewardConfig, task: Task, response: Response
) -> tuple[dict[str, float], str | None]:
    """Compute what needs neither the judge nor a sandbox; for a worker process, as it may hang or die.

    Args:
        cfg: How responses are rewarded.
        task: What was asked.
        response: What was answered.

    Returns:
        Component -> value, and the final answer.
    """
    read = answer.read(response.text, cfg.style, cut=response.cut)
    found = {"format": float(read.well_formed)}
    if task.verifier in verifiers.VERIFIERS:
        with fence.closed():
            found["correct"] = float(verifiers.verify(read.final, task))
    target = task.language or language.detect(task.question)
    if target is not None:
        found["language"] = language.share(response.text, target)
    if cfg.length is not None:
        over = (response.n_tokens - cfg.length.free) / (cfg.length.limit - cfg.length.free)
        found["length"] = -min(max(over, 0.0), 1.0)
    if cfg.custom is not None and cfg.weights_of(task.domain).custom:
        found["custom"] = float(load_function(cfg.custom)(task, response.text, response.n_tokens))
    return found, read.final


@cache
def load_function(place: str, field: str = "custom") -> Callable[..., Any]:
    """Load a function of one's own, such as a reward.

    Args:
        place: `FILE.py:NAME`.
        field: Of the config, for messages.

    Returns:
        The function; the file is run once a process.

    Raises:
        UsageError: If there is no such file or function, or the file does not run.
    """
    path, colon, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"own_{field}", path) if colon else None
    if spec is None or spec.loader is None:
        raise UsageError(f"{field}={place} must be FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is not our code: anything may come
        raise UsageError(
            f"{field}={place} does not run: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{field}={place}: the file has no function {name!r}")
    return function


def prepare_worker(custom: str | None) -> None:
    """Import what rules need, and load the function of one's own, before the first response's time runs."""
    import math_verify
    import reasoning_gym

    del math_verify, reasoning_gym
    if custom is not None:
        load_function(custom)


class Rewarder:
    """Rewards responses, many at once; a context manager.

    Args:
        cfg: How.
        folder: For the judge's ledger.
        should_stop: Asked while waiting; True ends the wait with `WorkFailedError`.

    Raises:
        UsageError: If the function of one's own, the judge's key or a library is missing.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        folder: Location,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the first worker."""
        if cfg.ray is not None and cfg.custom is not None:
            cfg = replace(
                cfg, custom=os.path.abspath(cfg.custom)
            )  # workers elsewhere run in other folders
        self._cfg = cfg
        self._should_stop = should_stop
        self._closing = False
        self._judge = None
        if cfg.judge is not None:
            self._judge = Judge(cfg.judge, folder / LEDGER_FILE, should_stop=self._is_over)
        self._pool = Pool(cfg.workers, _workers(cfg))
        self._code = CodeJudge(cfg.code, should_stop=self._is_over)
        judged_at_once = cfg.judge.concurrency if cfg.judge is not None else 0
        n_threads = cfg.workers + judged_at_once + cfg.code.sandboxes
        self._threads = ThreadPoolExecutor(n_threads, "reward")

    def __enter__(self) -> "Rewarder":
        """Return the rewarder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Drop what waits, and end the workers."""
        self._closing = True
        self._pool.close()
        self._threads.shutdown(cancel_futures=True)
        if self._judge is not None:
            self._judge.close()

    def submit(self, task: Task, response: Response) -> Future[Scored]:
        """Begin to reward a response, as soon as it is drawn.

        Args:
            task: What was asked.
            response: What was answered.

        Returns:
            Its reward to come; it raises `WorkFailedError` if the run can not go on.
        """
        return self._threads.submit(self._score, task, response)

    def score(self, tasks: Sequence[Task], responses: Sequence[Response]) -> list[Scored]:
        """Reward responses.

        Args:
            tasks: What each answers.
            responses: As many.

        Returns:
            Their rewards, in order.

        Raises:
            WorkFailedError: If too many have none, the judge's cap is reached or its endpoint refuses, no worker can be
                started, or the run is to stop.
        """
        futures = [self.submit(*pair) for pair in zip(tasks, responses, strict=True)]
        waiting: Set[Future[Scored]] = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=POLL_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()  # raises what the run can not go on from, not waiting for the others
            if waiting and self._should_stop():
                raise WorkFailedError("the run was stopped while responses were rewarded")
        scored = [future.result() for future in futures]
        require_rewards(scored, self._cfg.max_fault_share)
        return scored

    @property
    def judge_tokens(self) -> int:
        """Tokens that the judge has cost so far."""
        return self._judge.spent if self._judge is not None else 0

    def _is_over(self) -> bool:
        return self._closing or self._should_stop()

    def _score(self, task: Task, response: Response) -> Scored:
        if response.cut and self._cfg.cut == "drop":
            return Scored(None, {}, "cut", "ended at the limit of tokens")
        weights = self._cfg.weights_of(task.domain)
        try:
            components, final = self._pool.call(measure, self._cfg, task, response)
        except WorkerError as error:
            return Scored(None, {}, error.fault, f"{task.name}: {error}")
        if task.verifier == "code":
            try:
                components["correct"] = 0.0 if final is None else self._code.judge(final, task)
            except SandboxError as error:
                return Scored(None, components, "sandbox", f"{task.name}: {error}")
        if self._judge is not None and weights.judge:
            try:
                components["judge"] = 0.0 if final is None else self._judge.score(task, final)
            except JudgeError as error:
                return Scored(None, components, "unjudged", f"{task.name}: {error}")
        return compose(weights, task, components)


def _workers(cfg: RewardConfig) -> Workers:
    """Return where workers come from."""
    options: dict[str, Any] = {
        "timeout_s": cfg.timeout_s,
        "memory_mib": cfg.memory_mib,
        "prepare": partial(prepare_worker, cfg.custom),
        "preload": (__name__, "math_verify", "reasoning_gym"),
    }
    if cfg.ray is None:
        return LocalWorkers(**options)
    from train.rl.ray_workers import RayWorkers

    return RayWorkers(cfg.ray, **options)


def compose(weights: Weights, task: Task, components: Mapping[str, float]) -> Scored:
    """Add components up.

    Args:
        weights: Of the task's domain.
        task: For messages.
        components: Those that were computed; one that counts and is missing has nothing to say and adds nothing.

    Returns:
        The reward; none where a component is no number in its range.
    """
    for name, value in components.items():
        low, high = (-1.0, 0.0) if name == "length" else (0.0, 1.0)
        if not math.isfinite(value) or (name != "custom" and not low <= value <= high):
            good = {k: v for k, v in components.items() if k != name and math.isfinite(v)}
            message = f"{task.name}: {name} is {value}"
            return Scored(None, good, "not_a_number", message)
    by_component = weights.by_component()
    total = math.fsum(by_component[name] * value for name, value in components.items())
    if not math.isfinite(total):
        return Scored(None, components, "not_a_number", f"{task.name}: the sum is {total}")
    return Scored(total, components)


def require_rewards(scored: Sequence[Scored], max_share: float) -> None:
    """Stop a run whose rewards fail; cut responses do not count as failures.

    Args:
        scored: Of a batch.
        max_share: Of them, that may have no reward.

    Raises:
        WorkFailedError: If more have none: says how many of which fault, and the first.
    """
    faults = [one for one in scored if one.fault not in (None, "cut")]
    if len(faults) > max_share * len(scored):
        counts = Counter(one.fault for one in faults)
        kinds = ", ".join(f"{n} {fault}" for fault, n in counts.items())
        raise WorkFailedError(
            f"{len(faults)} of {len(scored)} responses have no reward ({kinds}), more than"
            f" max_fault_share={max_share:g}; the first: {faults[0].message}"
        )


def summarise(groups: Sequence[Sequence[Scored]]) -> dict[str, float]:
    """Return figures for a log.

    Args:
        groups: The rewards of the responses to each prompt.

    Returns:
        `reward/mean` and `reward/<component>` (means over the responses that have them), `reward/equal_groups` (groups
        without two different rewards, which teach nothing), `reward/faults` and `reward/faults/<fault>` (responses
        without a reward), as counts.
    """
    every = [one for group in groups for one in group]
    figures: dict[str, float] = {}
    rewards = [one.total for one in every if one.total is not None]
    if rewards:
        figures["reward/mean"] = math.fsum(rewards) / len(rewards)
    for name in sorted({name for one in every for name in one.components}):
        values = [one.components[name] for one in every if name in one.components]
        figures[f"reward/{name}"] = math.fsum(values) / len(values)
    totals = [[one.total for one in group if one.total is not None] for group in groups]
    figures["reward/equal_groups"] = 1.0 * sum(not t or max(t) - min(t) < EQUAL for t in totals)
    faults = Counter(one.fault for one in every)
    figures["reward/faults"] = float(len(every) - len(rewards))
    return figures | {f"reward/faults/{fault}": float(faults[fault]) for fault in FAULTS}
