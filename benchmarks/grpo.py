"""Time GRPO's steps, rollouts drawn before the learner works and beside it: `python benchmarks/grpo.py --help`.

Random weights, prompts and rewards, the run's own sampler, learner and order of work; no task library is needed. A side
is idle while a step does not have it drawing (or rewarding), or learning. Two ceilings: of training, the device's peak
where it is known; of drawing, one reading of all weights a decoding step at the rate at which this device copies an
array, prompts, cache and everything else left out.
"""

import argparse
import dataclasses
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing

from dsv32_jax import config, parameters, sharding
from dsv32_jax.config import ModelConfig
from dsv32_jax.parameters import Parameters
from dsv32_jax.sharding import MeshConfig
from train import state as states
from train.optimizer import AdamConfig, OptimizerConfig, Schedule, make_optimizer
from train.progress import peak_flops
from train.rl.draws import Draws
from train.rl.objective import ObjectiveConfig
from train.rl.rewards import Scored
from train.rl.rollout import Rollout
from train.rl.settings import LearnerConfig, RolloutConfig
from train.rl.trainer import Asked, Learner, Sampler
from train.stage import train_flops

COPIED = 1 << 26  # float32 of the array that is copied, far beyond any cache
UNTIMED = 2  # steps that compile
HEAD = (
    "rollouts", "step s", "tokens/s", "drawn tokens/s", "of ceiling", "trained tokens/s", "of peak", "sampler idle",
    "learner idle", "sync",
)  # fmt: skip


class Random:
    """Prompts drawn at random; a reward for the share of tokens of the vocabulary's lower half."""

    eos_id = 0

    def __init__(self, vocab_size: int, n_tokens: int) -> None:
        """Keep the sizes."""
        self._half, self._n_tokens = vocab_size // 2, n_tokens

    def ask(self, number: int) -> Asked:
        """Return a prompt."""
        prompt = np.random.default_rng(number).integers(1, 2 * self._half, self._n_tokens)
        return Asked("random", prompt.tolist(), number, "random")

    def judge(self, answers: Sequence[tuple[Asked, Rollout]]) -> list[Scored]:
        """Return what each response is worth."""
        return [Scored(float(np.mean(drawn.response < self._half)), {}) for _, drawn in answers]


def main() -> None:
    """Print a row without and one with overlap."""
    args = _arguments()
    cfg = dataclasses.replace(config.PRESETS[args.preset](), mtp=False)
    devices = jax.devices()
    if args.devices >= len(devices):
        raise SystemExit(
            f"error: --devices {args.devices} leaves none of {len(devices)} to the learner"
        )
    mesh = sharding.make_mesh(MeshConfig(), devices[: len(devices) - args.devices])
    apart = sharding.make_mesh(MeshConfig(), devices[-args.devices :]) if args.devices else mesh
    versions = {"flax": flax.__version__, "optax": optax.__version__}
    shape = {k: v for k, v in vars(args).items() if k != "json"} | {"dtype": cfg.dtype}
    report = timing.Report(args.json, **versions, **shape)
    print(
        f"{args.preset}, {cfg.dtype}, {args.prompts} prompts of {args.prompt_tokens} tokens x {args.group_size}"
        f" responses of up to {args.max_tokens}, {args.slots} at once, {args.steps} steps timed;"
        f" {devices[0].device_kind} x {len(devices)}, of which {args.devices} draw alone,"
        f" {platform.processor() or platform.machine()}; jax {jax.__version__},"
        f" {', '.join(f'{name} {version}' for name, version in versions.items())}; {time.strftime('%Y-%m-%d')}"
    )
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    with jax.set_mesh(mesh):
        learner = _learner(cfg, args)
        ceiling = args.slots / _weights_seconds(cfg, apart)
        for overlap in (False, True):
            found = _time(cfg, args, learner, mesh, apart, overlap=overlap)
            row = _row(cfg, args, found, ceiling, mesh.size)
            report.add({"overlap": overlap, **found})
            print(f"| {'beside' if overlap else 'before'} | {' | '.join(row)} |", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python benchmarks/grpo.py\n"
        "  python benchmarks/grpo.py --preset gpu_100m --prompts 64 --group-size 16 --prompt-tokens 256"
        " --max-tokens 512 --slots 512 --rows 16 --row-length 4096 --json grpo.json",
    )
    add = parser.add_argument
    add("--preset", choices=sorted(config.PRESETS), default="cpu_1m")
    add("--prompts", type=timing.count, default=8, help="of a step (8)")
    add("--group-size", type=timing.count, default=8, help="responses to each, at least 2 (8)")
    add("--prompt-tokens", type=timing.count, default=32, help="of each prompt (32)")
    add("--max-tokens", type=timing.count, default=32, help="of a response (32)")
    add("--slots", type=timing.count, default=64, help="responses drawn at once (64)")
    add("--rows", type=timing.count, default=8, help="of a microbatch (8)")
    add("--row-length", type=timing.count, default=512, help="tokens of a row (512)")
    add("--steps", type=timing.count, default=8, help=f"timed, after {UNTIMED} that compile (8)")
    add("--devices", type=int, default=0, help="that draw and do nothing else, the last ones (0)")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    if args.group_size < 2:
        parser.error("--group-size must be at least 2")
    if args.row_length < args.prompt_tokens + args.max_tokens:
        parser.error("--row-length must hold a prompt and its response")
    if args.devices < 0:
        parser.error("--devices must not be negative")
    return args


def _learner(cfg: ModelConfig, args: argparse.Namespace) -> Learner:
    settings = LearnerConfig(
        objective=ObjectiveConfig(kl_strength=0.001, off_policy_delta=0.5),
        optimizer=OptimizerConfig(
            main=Schedule(peak=1e-6), adam=AdamConfig(weight_decay=0.0)
        ),
        rows=args.rows,
        row_length=args.row_length,
    )  # fmt: skip
    return Learner(cfg, settings, kl_strength={}, max_tokens=args.max_tokens)


def _weights_seconds(cfg: ModelConfig, mesh: jax.sharding.Mesh) -> float:
    """Return how long reading all weights once takes, in the dtype of their products, at the rate of a copy."""
    shapes = parameters.abstract(cfg).weights
    sizes = {n: jnp.dtype(parameters.product_dtype(n, cfg)).itemsize for n in shapes}
    weights = sum(leaf.size * sizes[name] for name, leaf in shapes.items())
    array = jax.device_put(jnp.ones(COPIED, jnp.float32), mesh.devices.flat[0])
    seconds = timing.median_seconds(jax.jit(lambda x: x + 1), (array,), 5)
    return weights / mesh.size / (2 * array.nbytes / seconds)


def _time(
    cfg: ModelConfig,
    args: argparse.Namespace,
    learner: Learner,
    mesh: jax.sharding.Mesh,
    apart: jax.sharding.Mesh,
    *,
    overlap: bool,
) -> dict[str, float]:
    """Return the seconds of a step and of its parts, and its tokens: medians of the timed steps, as some compile."""
    rollouts = RolloutConfig(
        prompts=args.prompts, group_size=args.group_size, max_prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens, slots=args.slots, staleness=1, overlap=overlap,
    )  # fmt: skip
    tasks = Random(cfg.vocab_size, args.prompt_tokens)
    where = apart if overlap or args.devices else None
    sampler = Sampler(cfg, rollouts, tasks, seed=0, mesh=where)
    draws = Draws(sampler, rollouts)
    params = parameters.initialise(cfg, 0, mesh)
    reference: Parameters = jax.tree.map(jnp.copy, params)
    optimizer = make_optimizer(AdamConfig(weight_decay=0.0))
    state = states.create(params, optimizer, "rl", states.shardings(cfg, optimizer, "rl", mesh))
    steps: list[dict[str, float]] = []
    for step in range(UNTIMED + args.steps):
        began = time.monotonic()
        groups, figures = draws.next(state.parameters, step)
        state, learned = learner.step(state, reference, groups, step)
        figures |= learned | {"seconds": time.monotonic() - began}
        figures["drawn"] = figures["length"] * figures["responses"]
        figures["trained"] = float(sum(len(r.tokens) for g in groups for r in g.rollouts))
        steps.append(figures)
    draws.collect()
    names = (
        "seconds",
        "seconds/rollout",
        "seconds/rewards",
        "seconds/train",
        "seconds/sync",
        "drawn",
        "trained",
    )
    return {name: float(np.median([one[name] for one in steps[UNTIMED:]])) for name in names}


def _row(
    cfg: ModelConfig,
    args: argparse.Namespace,
    found: Mapping[str, Any],
    ceiling: float,
    n_devices: int,
) -> list[str]:
    """Return the cells of a row behind the first."""
    step = found["seconds"]
    drawing, training = (
        found["drawn"] / found["seconds/rollout"],
        found["trained"] / found["seconds/train"],
    )
    peak = peak_flops(jax.devices()[0])
    flops = train_flops(cfg, args.prompt_tokens + args.max_tokens, "rl")
    drawn = found["seconds/rollout"] + found["seconds/rewards"]
    return [
        f"{step:.2f}",
        f"{found['drawn'] / step:,.0f}",
        f"{drawing:,.0f}",
        f"{drawing / ceiling:.1%}",
        f"{training:,.0f}",
        f"{training * flops / peak / n_devices:.1%}" if peak else "unknown",
        f"{max(1 - drawn / step, 0):.0%}",
        f"{max(1 - found['seconds/train'] / step, 0):.0%}",
        f"{found['seconds/sync'] / step:.1%}",
    ]


if __name__ == "__main__":
    main()
