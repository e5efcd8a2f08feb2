"""Time prefill and decoding against batch and context, sparse and dense.

python benchmarks/generate.py --preset cpu_1m --batches 1,8 --contexts 256,1024,4096,16384 --plot decode.png
python benchmarks/generate.py --preset slice_671b --cache-dtype fp8 --batches 1,32 --contexts 4096,131072

Decoding is timed on a cache of random rows, as its cost does not depend on what the rows hold; `slice_671b` is one
dense and one expert layer of the 671B model with an eighth of its experts, what one of eight devices would hold.
"""

import argparse
import dataclasses
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dsv32_jax import cache as caches
from dsv32_jax import config, parameters
from dsv32_jax.generate import decoder, steps
from dsv32_jax.generate.sampling import Knobs

PAGE_SIZE = 64


def slice_671b() -> config.ModelConfig:
    """Return one dense and one expert layer of the released model, with 32 of its 256 experts."""
    full = config.v32_671b()
    moe = dataclasses.replace(full.moe, n_experts=32)
    return dataclasses.replace(full, n_layers=2, n_dense_layers=1, moe=moe, mtp=False)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="cpu_1m", choices=[*config.PRESETS, "slice_671b"])
    parser.add_argument("--dtype", default=None, choices=["float32", "bfloat16"])
    parser.add_argument("--cache-dtype", default="model", choices=["model", "fp8"])
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--contexts", default="256,1024,4096,16384")
    parser.add_argument("--prefill-contexts", default="")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    cfg = slice_671b() if args.preset == "slice_671b" else config.PRESETS[args.preset]()
    cfg = dataclasses.replace(cfg, mtp=False, dtype=args.dtype or cfg.dtype)
    parts = _parts(cfg)
    device = jax.devices()[0]
    print(f"{args.preset}, {cfg.dtype}, cache {args.cache_dtype}, top-k {cfg.indexer.topk}")
    print(
        f"{device.device_kind}, jax {jax.__version__}, median of {args.steps} steps, chunk {args.chunk}\n"
    )
    contexts, batches = _numbers(args.contexts), _numbers(args.batches)
    print("| batch | context | sparse ms/step | sparse tokens/s | dense ms/step | dense tokens/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    found: dict[tuple[int, str], list[float]] = {}
    for batch in batches:
        for context in contexts:
            cells = []
            for mode in ("sparse", "dense"):
                seconds = _decode(parts, cfg, args, batch, context, mode)
                found.setdefault((batch, mode), []).append(seconds)
                cells += [f"{seconds * 1e3:.2f}", f"{batch / seconds:,.0f}"]
            print(f"| {batch} | {context:,} | " + " | ".join(cells) + " |", flush=True)
    print("\n| tokens before the chunk | prefill tokens/s |\n| --- | --- |")
    for context in _numbers(args.prefill_contexts) or [0, contexts[-1] // 4]:
        seconds = _prefill(parts, cfg, args, context)
        print(f"| {context:,} | {args.chunk / seconds:,.0f} |", flush=True)
    if args.plot:
        _plot(
            args.plot,
            contexts,
            found,
            f"{args.preset}, {device.device_kind}, top-k {cfg.indexer.topk}",
        )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _parts(cfg: config.ModelConfig) -> decoder.Decoder:
    """Draw weights, born in the dtype they are kept in."""
    shapes = parameters.abstract(cfg)

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        dtype = parameters.product_dtype(name, cfg)
        if "norm" in name:
            return jnp.ones(shape, jnp.float32)
        return _normal(jax.random.key(len(name)), shape, dtype) * jnp.asarray(cfg.init_std, dtype)

    weights = {name: draw(name, leaf.shape) for name, leaf in shapes.weights.items()}
    bias = {name: jnp.zeros(leaf.shape, jnp.float32) for name, leaf in shapes.router_bias.items()}
    return decoder.from_model(parameters.assemble(cfg, parameters.Parameters(weights, bias)))


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def _setup(
    cfg: config.ModelConfig, args: argparse.Namespace, batch: int, context: int, mode: str
) -> tuple:
    """Return a cache of random rows, page tables and settings."""
    per_row = 1 << (max(-(-context // PAGE_SIZE), 1) - 1).bit_length()
    layout = caches.CacheConfig(
        n_pages=batch * per_row, page_size=PAGE_SIZE, dtype=args.cache_dtype
    )
    cache = tuple(
        jax.tree.map(lambda x: _fill(x.shape, x.dtype), layer)
        for layer in caches.make_cache(cfg, layout, mtp=False)
    )
    pages = np.random.default_rng(0).permutation(layout.n_pages).reshape(batch, per_row)
    knobs = Knobs(
        jnp.ones(batch), jnp.ones(batch), jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.uint32)
    )
    static = steps.Static(cfg, PAGE_SIZE, mode, False)
    return static, cache, jnp.asarray(pages, jnp.int32), knobs


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _fill(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    if dtype == jnp.float32 and shape[1] <= 8:
        return jnp.ones(shape, dtype)  # scales
    if dtype == jnp.int32:
        return jnp.full(shape, 0x3F803F80, dtype)  # records: two bfloat16 ones a word
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16).astype(dtype)


def _decode(
    parts: decoder.Decoder,
    cfg: config.ModelConfig,
    args: argparse.Namespace,
    batch: int,
    context: int,
    mode: str,
) -> float:
    static, cache, table, knobs = _setup(cfg, args, batch, context, mode)
    token = jnp.zeros(batch, jnp.int32)
    position = jnp.full(batch, context - 1, jnp.int32)
    times = []
    for _ in range(args.steps + 2):
        began = time.perf_counter()
        cache, drawn = steps.compiled().decode(static, parts, cache, token, position, table, knobs)
        drawn.token.block_until_ready()
        times.append(time.perf_counter() - began)
    return float(np.median(times[2:]))


def _prefill(
    parts: decoder.Decoder, cfg: config.ModelConfig, args: argparse.Namespace, context: int
) -> float:
    static, cache, table, knobs = _setup(cfg, args, 1, context + args.chunk, "sparse")
    tokens = jnp.zeros((1, args.chunk), jnp.int32)
    position = context + jnp.arange(args.chunk, dtype=jnp.int32)[None]
    times = []
    for _ in range(max(args.steps // 4, 3) + 1):
        began = time.perf_counter()
        cache, _, drawn = steps.compiled().prefill(
            static, parts, cache, None, jnp.int32(0), tokens, tokens, position, table, knobs,
            jnp.bool_(False),
        )  # fmt: skip
        drawn.token.block_until_ready()
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:]))


def _plot(
    path: Path, contexts: list[int], found: dict[tuple[int, str], list[float]], title: str
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for (batch, mode), seconds in found.items():
        style = "-" if mode == "sparse" else "--"
        per_token = [s / batch * 1e3 for s in seconds]
        axes.loglog(contexts, per_token, style, marker="o", label=f"{mode}, batch {batch}")
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("ms per token")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    axes.grid(True, which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
