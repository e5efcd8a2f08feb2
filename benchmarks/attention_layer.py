"""Time an attention layer of the released model, dense and sparse: `python benchmarks/attention_layer.py --help`."""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv32_jax import config, segments, sharding
from dsv32_jax.mla import MLA

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
FORMS = {"dense": ("dense", 0), "masked": ("sparse", 2**30), "gathered": ("sparse", 0)}


def median_ms(run: Any, module: MLA, x: jax.Array, rounds: int) -> float:
    """Return the median milliseconds of one pass."""
    jax.block_until_ready(run(module, x))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(run(module, x))
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e3


def layer(cfg: config.ModelConfig, masked_max_len: int) -> MLA:
    """Return the layer in bf16, with random weights of a size that keeps logits near 1."""
    cfg = dataclasses.replace(cfg, mla=dataclasses.replace(cfg.mla, masked_max_len=masked_max_len))
    graph, weights = nnx.split(MLA(cfg, rngs=nnx.Rngs(0)))
    return nnx.merge(graph, jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights))


def pass_ms(cfg: config.ModelConfig, form: str, length: int, rounds: int) -> float:
    """Time one pass of the layer over one document; no tokens take no time."""
    if length <= 0:
        return 0.0
    mode, masked_max_len = FORMS[form]
    x = jax.random.normal(jax.random.key(1), (1, length, cfg.dim), jnp.bfloat16)
    documents = segments.from_ids(jnp.ones((1, length), jnp.int32))
    run = jax.jit(lambda module, x: module(x, documents, mode=mode)[0])
    return median_ms(run, layer(cfg, masked_max_len), x, rounds)


def main() -> None:
    """Print the time per token of each form and length, over all tokens and at the end, where it is largest.

    The end is told by difference: (time of n tokens - time of n - last) / last.
    """
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/attention_layer.py --lengths 8192 131072 --fp8",
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--masked-to", type=int, default=32768, help="longest masked form (32768)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fp8", action="store_true", help="indexer in FP8, as the released model")
    parser.add_argument("--kernels", choices=("auto", "fp8", "reference"), default="auto")
    parser.add_argument(
        "--last", type=int, default=4096, help="tokens that count as the end (4096)"
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    cfg = config.v32_671b()
    index = dataclasses.replace(cfg.indexer, fp8=args.fp8)
    cfg = dataclasses.replace(cfg, indexer=index, kernels=args.kernels, init_std=0.02)
    device = jax.devices()[0]
    print(f"{device.device_kind}; jax {jax.__version__}; {time.strftime('%Y-%m-%d')}; {args}")
    print("| tokens | form | ms | us/token | us/token at the end | dense / this at the end |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    results = []
    with jax.set_mesh(sharding.make_mesh(sharding.MeshConfig())):
        for length in args.lengths:
            dense = None
            for form in args.forms:
                if form == "masked" and length > args.masked_to:
                    continue
                ms = [pass_ms(cfg, form, n, args.rounds) for n in (length, length - args.last)]
                at_end = (ms[0] - ms[1]) / args.last * 1e3
                dense = at_end if form == "dense" else dense
                ratio = f"{dense / at_end:.2f}" if dense else "-"
                cells = (length, form, f"{ms[0]:.2f}", f"{ms[0] / length * 1e3:.2f}")
                cells += (f"{at_end:.2f}", ratio)
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
                results.append({"tokens": length, "form": form, "ms": ms[0], "us_at_end": at_end})
    if args.json:
        report = {"device": device.device_kind, "jax": jax.__version__, "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {args.json}")


if __name__ == "__main__":
    main()
