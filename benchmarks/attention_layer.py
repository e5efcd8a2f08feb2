"""Time an attention layer of the released model, dense and sparse: `python benchmarks/attention_layer.py --help`."""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import timing
from flax import nnx

from dsv32_jax import config, layers, segments, sharded_ops, sharding
from dsv32_jax.mla import MLA
from pallas_kernels.fp8 import op as fp8

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
FORMS = {"dense": ("dense", 0), "masked": ("sparse", 2**30), "gathered": ("sparse", 0)}


def make_layer(cfg: config.ModelConfig, masked_max_len: int) -> MLA:
    """Return the layer in bf16, with random weights of a size that keeps logits near 1."""
    cfg = dataclasses.replace(cfg, mla=dataclasses.replace(cfg.mla, masked_max_len=masked_max_len))
    graph, weights = nnx.split(MLA(cfg, rngs=nnx.Rngs(0)))
    return nnx.merge(graph, jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights))


def normal(seed: int, *shape: int) -> jax.Array:
    """Draw standard normal bf16 values."""
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(seed))


def whole_ms(cfg: config.ModelConfig, form: str, length: int, rounds: int) -> float:
    """Time one pass of the layer over one document."""
    mode, masked_max_len = FORMS[form]
    documents = segments.from_ids(jnp.ones((1, length), jnp.int32))
    run = jax.jit(lambda layer, x: layer(x, documents, mode=mode)[0])
    x = normal(1, 1, length, cfg.dim)
    return 1e3 * timing.median_seconds(run, (make_layer(cfg, masked_max_len), x), rounds)


def end_ms(cfg: config.ModelConfig, form: str, length: int, last: int, rounds: int) -> float:
    """Time the last tokens of a document alone: projections, and attention to all that came before.

    What they attend to is drawn at random and given: latents and index keys, or dense attention's keys and values.
    """
    place = jnp.arange(length - last, length, dtype=jnp.int32)[None]
    start, end = jnp.zeros_like(place), place + 1
    sizes, scale, kernels = cfg.mla, cfg.softmax_scale, cfg.implementation

    def dense(layer: MLA, x: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        parts, _ = layer.project(x, place)
        q, *own = layer.expand(parts)
        out, _ = sharded_ops.attend_range(q, k, v, start, end, None, scale, kernels, square=False)
        return layers.project("bthu,hud->btd", out, layer.wo), own

    def sparse(layer: MLA, x: jax.Array, kv: jax.Array, index_k: jax.Array) -> Any:
        parts, index = layer.project(x, place)
        q, own = layer.absorb(parts)
        chosen = sharded_ops.select_indices(
            index._replace(k=index_k), cfg.indexer.topk, start, end, cfg.selection_implementation,
            square=False,
        )  # fmt: skip
        out, _ = sharded_ops.attend_selected(
            q, kv, chosen, scale, sizes.kv_lora_rank, kernels, cfg.deterministic
        )
        out = layer.unabsorb(out)
        return layers.project("bthu,hud->btd", out, layer.wo), own, index.k

    if form == "dense":
        k = normal(2, 1, length, sizes.n_heads, sizes.qk_dim)
        before = (k, normal(3, 1, length, sizes.n_heads, sizes.v_dim))
    else:
        keys = normal(3, 1, length, cfg.indexer.head_dim)
        keys = jax.jit(fp8.simulate)(keys) if cfg.indexer.fp8 else keys
        before = (normal(2, 1, length, sizes.kv_lora_rank + sizes.rope_dim), keys)
    run = jax.jit(dense if form == "dense" else sparse)
    return 1e3 * timing.median_seconds(
        run, (make_layer(cfg, 0), normal(1, 1, last, cfg.dim), *before), rounds
    )


def main() -> None:
    """Print the time of each form and length: of a whole document, and of its last tokens, where it is largest."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/attention_layer.py --lengths 8192 131072 --fp8 --kernels fp8",
    )
    parser.add_argument("--lengths", nargs="+", type=timing.count, default=list(LENGTHS))
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--masked-to", type=int, default=32768, help="longest masked form (32768)")
    parser.add_argument("--whole-to", type=int, default=131072, help="longest whole pass (131072)")
    parser.add_argument("--rounds", type=timing.count, default=5)
    parser.add_argument("--fp8", action="store_true", help="indexer in FP8, as the released model")
    parser.add_argument("--kernels", choices=("auto", "fp8", "reference"), default="auto")
    parser.add_argument(
        "--last", type=timing.count, default=4096, help="tokens that are the end (4096)"
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    cfg = config.v32_671b()
    index = dataclasses.replace(cfg.indexer, fp8=args.fp8)
    cfg = dataclasses.replace(cfg, indexer=index, kernels=args.kernels, init_std=0.02)
    device = timing.accelerator(parser)
    print(f"{device.device_kind}; jax {jax.__version__}; {time.strftime('%Y-%m-%d')}; {args}")
    print("| tokens | form | ms | us/token | us/token at the end | dense / this at the end |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    report = timing.Report(args.json, options=vars(args) | {"json": None})
    forms = [
        form for form in FORMS if form in args.forms
    ]  # dense first: the others are compared with it
    with jax.set_mesh(sharding.make_mesh(sharding.MeshConfig())):
        for length in args.lengths:
            at_end: dict[str, float] = {}
            for form in forms:
                if form == "masked" and length > args.masked_to:
                    continue
                cells = [f"{length:,}", form, "-", "-", "-", "-"]
                result: dict[str, Any] = {"tokens": length, "form": form}
                if length <= args.whole_to:
                    result["ms"] = whole_ms(cfg, form, length, args.rounds)
                    cells[2:4] = f"{result['ms']:.2f}", f"{result['ms'] / length * 1e3:.2f}"
                if form != "masked":
                    last = min(args.last, length)
                    at_end[form] = end_ms(cfg, form, length, last, args.rounds) / last * 1e3
                    result["us_at_end"] = at_end[form]
                    cells[4] = f"{at_end[form]:.2f}"
                    if "dense" in at_end:
                        cells[5] = f"{at_end['dense'] / at_end[form]:.2f}"
                print("| " + " | ".join(cells) + " |", flush=True)
                report.add(result)
    if args.json:
        print(f"written to {args.json}")


if __name__ == "__main__":
    main()
