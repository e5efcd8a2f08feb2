"""Time one training step of a preset in every stage: `python benchmarks/train_step.py --help`."""

import argparse
import dataclasses
import platform
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import timing

from dsv32_jax import config, parameters, sharding
from train import state as states
from train.losses import Batch
from train.optimizer import AdamConfig, Rates, make_optimizer
from train.progress import peak_flops
from train.stage import Stage, train_flops
from train.step import LossConfig, make_step

STAGES: tuple[Stage, ...] = ("dense", "warmup", "sparse", "window")
DEFAULT_SHAPES = {"cpu_1m": (8, 256), "gpu_100m": (16, 4096), "v32_1b": (8, 4096)}


def main() -> None:
    """Print a table of step time, tokens/s, model FLOP/s and memory, with the ceiling where it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/train_step.py --preset gpu_100m --batch 8 --seq-len 4096 --remat full",
    )
    parser.add_argument("--preset", choices=sorted(config.PRESETS), default="cpu_1m")
    parser.add_argument("--batch", type=timing.count, help="rows; default by preset")
    parser.add_argument("--seq-len", type=timing.count, help="tokens per row; default by preset")
    parser.add_argument("--remat", choices=("none", "dots", "full"), help="default: the preset's")
    parser.add_argument(
        "--steps", type=timing.count, default=10, help="timed steps after the first (10)"
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    args = parser.parse_args()
    batch, seq_len = DEFAULT_SHAPES.get(args.preset, (8, 256))
    batch, seq_len = args.batch or batch, args.seq_len or seq_len
    cfg = config.PRESETS[args.preset]()
    cfg = dataclasses.replace(cfg, remat=args.remat or cfg.remat)
    device = jax.devices()[0]
    print(
        f"{args.preset}, batch {batch} x {seq_len}, remat {cfg.remat}, {cfg.dtype}; "
        f"{device.device_kind} x {jax.device_count()}, {platform.processor() or platform.machine()}; "
        f"jax {jax.__version__}; {time.strftime('%Y-%m-%d')}"
    )
    print(
        "| stage | compile s | step ms (median) | tokens/s | model TFLOP/s | of peak | temp MiB | args MiB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for stage in args.stages:
        print(_row(cfg, stage, batch, seq_len, args.steps), flush=True)


def _row(cfg: config.ModelConfig, stage: Stage, batch: int, seq_len: int, steps: int) -> str:
    """Compile and time one stage."""
    mesh = sharding.make_mesh(sharding.MeshConfig())
    adam = AdamConfig()
    with jax.set_mesh(mesh):
        layout = states.shardings(cfg, make_optimizer(adam), stage, mesh)
        params = parameters.initialise(cfg, 0, mesh)
        state = states.create(params, make_optimizer(adam), stage, layout)
        tokens = jax.random.randint(jax.random.key(0), (batch, seq_len), 0, cfg.vocab_size)
        rows = Batch(tokens, jnp.ones_like(tokens))
        rates = Rates(np.float32(1e-4), np.float32(1e-4))
        began = time.perf_counter()
        step = make_step(cfg, LossConfig(), adam, stage, 1).lower(state, rows, rates).compile()
        compile_s = time.perf_counter() - began
        times = sorted(_times(step, state, rows, rates, steps))
    median = times[len(times) // 2]
    rate = train_flops(cfg, seq_len, stage) * batch * seq_len / median
    peak = peak_flops(jax.devices()[0])
    share = f"{rate / peak / jax.device_count():.1%}" if peak else "unknown"
    memory = step.memory_analysis()
    cells = (
        stage,
        f"{compile_s:.0f}",
        f"{median * 1e3:.1f}",
        f"{batch * seq_len / median:,.0f}",
        f"{rate / 1e12:.3f}",
        share,
        f"{memory.temp_size_in_bytes / 2**20:.0f}",
        f"{memory.argument_size_in_bytes / 2**20:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def _times(
    step: jax.stages.Compiled, state: states.TrainState, rows: Batch, rates: Rates, steps: int
) -> Iterator[float]:
    """Yield the seconds of each step after the first."""
    for i in range(steps + 1):
        began = time.perf_counter()
        state, metrics = step(state, rows, rates)
        jax.block_until_ready(metrics)
        if i:
            yield time.perf_counter() - began


if __name__ == "__main__":
    main()
