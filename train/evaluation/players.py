"""Policies at work: a checkpoint on the engine, or an endpoint."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from dsv32_jax import load_model, progress_line, sharding
from dsv32_jax.cache import CacheConfig
from dsv32_jax.convert import run_folder, storage
from dsv32_jax.errors import UsageError
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig
from dsv32_jax.tokenizer import Tokenizer
from train.agents.endpoint import EndpointLoop
from train.agents.forms import CompactForm, Form, OfficialForm
from train.agents.loop import Job, Loop
from train.agents.trajectory import Trajectory
from train.evaluation.attempts import Planned, TrajectoryFile
from train.evaluation.config import EvaluateConfig, FormName, PolicyConfig
from train.evaluation.questions import PlainForm

logger = logging.getLogger(__name__)

PAGE_SIZE = 64
# play(jobs) yields (place in the jobs, its trajectory), those that end first first.
Play = Callable[[Sequence[Job]], Iterator[tuple[int, Trajectory]]]


def identity(policy: PolicyConfig) -> dict[str, str]:
    """Say which policy it is, so that an evaluation is not finished with another.

    Args:
        policy: The policy.

    Returns:
        Its place; of an endpoint its model, of a run's folder the step that is evaluated.

    Raises:
        FileNotFoundError: If a checkpoint is not there.
    """
    if policy.is_endpoint:
        return {"place": policy.place, "model": policy.model}
    path = storage.as_path(storage.locate(policy.place))
    if not path.is_dir():
        raise FileNotFoundError(f"policy {policy.name}: no folder {policy.place}")
    if not (run_folder.folder_of(path) / run_folder.CHECKPOINTS).is_dir():
        return {"place": policy.place}  # an official folder, which no run goes on in
    return {"place": policy.place, "step": run_folder.find(path).step.name}


@contextlib.contextmanager
def open_player(cfg: EvaluateConfig, policy: PolicyConfig) -> Iterator[Play]:
    """Load a checkpoint, or connect to an endpoint, for as long as the `with` block lasts.

    Args:
        cfg: The evaluation.
        policy: Who plays.

    Yields:
        What plays jobs.
    """
    if policy.is_endpoint:
        with EndpointLoop(
            cfg.endpoint.of(policy), limits=cfg.limits, context=cfg.managed
        ) as endpoint:
            yield endpoint.play
        return
    loop = _engine_loop(cfg, policy)
    try:
        yield loop.play
    finally:
        loop.close()


def _engine_loop(cfg: EvaluateConfig, policy: PolicyConfig) -> Loop:
    settings, place = cfg.engine, storage.locate(policy.place)
    words = load_model.load_tokenizer_of(place, settings.tokenizer)
    mesh = settings.mesh and sharding.make_mesh(sharding.parse_mesh(settings.mesh))
    dtype = settings.dtype or load_model.saved_dtype(place)
    model = load_model.load_model(place, dtype, mesh=mesh or None, narrow=True)
    if words.vocab_size > model.cfg.vocab_size:
        raise UsageError(
            f"policy {policy.name}: the tokenizer has {words.vocab_size} tokens, the model {model.cfg.vocab_size}"
        )
    pages = settings.slots * -(-(settings.max_len + 1) // PAGE_SIZE)
    engine = Engine(
        model,
        EngineConfig(
            n_slots=settings.slots,
            max_len=settings.max_len,
            cache=CacheConfig(n_pages=pages, page_size=PAGE_SIZE),
            mode="dense" if settings.dense else "sparse",
            keep_sets=cfg.top_p < 1 or cfg.top_k > 0,
        ),
        eos_id=words.eos_id,
        mesh=mesh or None,
    )
    return Loop(
        engine,
        form_of(cfg.form, words),
        limits=cfg.limits,
        context=cfg.managed,
        workers=cfg.tool_threads,
    )


def form_of(name: FormName, words: Tokenizer) -> Form:
    """Return how conversations with a checkpoint are written.

    Args:
        name: Of the form.
        words: The checkpoint's tokenizer.

    Returns:
        The form.
    """
    if name == "plain":
        return PlainForm(tokenizer=words)
    if name == "compact":
        return CompactForm(tokenizer=words)
    return OfficialForm(tokenizer=words, thinking_mode=name)


def make_runs(
    cfg: EvaluateConfig, policy: PolicyConfig, runs: Sequence[Planned], file: TrajectoryFile
) -> None:
    """Make runs of one policy, each written down as it ends.

    Args:
        cfg: The evaluation.
        policy: Who makes them.
        runs: Which.
        file: Where they are written.
    """
    jobs = [Job(run.environment, run.task, cfg.params(seed=run.seed)) for run in runs]
    show = progress_line.ProgressLine(sys.stderr, seconds=10.0)
    logger.info("%s: %d runs", policy.name, len(jobs))
    with open_player(cfg, policy) as play:
        began, solved, tokens = time.monotonic(), 0, 0
        for n, (place, trajectory) in enumerate(play(jobs), 1):
            file.add(runs[place], trajectory)
            solved, tokens = solved + trajectory.solved, tokens + trajectory.tokens
            seconds = time.monotonic() - began
            left = seconds / n * (len(jobs) - n)
            show.show(
                f"{policy.name}: {n}/{len(jobs)} runs, {solved} solved, {tokens / seconds:,.0f} tokens/s,"
                f" {left:.0f} s left",
                now=n == len(jobs),
            )
    show.close()
