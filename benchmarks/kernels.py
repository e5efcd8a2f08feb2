"""Time every kernel against this device's ceilings: `python benchmarks/kernels.py --help`."""

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels.fp8 import op as fp8

Arrays = tuple[jax.Array, ...]
ROUND_S = 0.05  # one timed round lasts about this long
QUERIES, HEADS, SLOTS = 4096, 128, 2048  # the 671B model's attention, one 4096-token piece
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
INDEX_HEADS, INDEX_DIM = 64, 128
CAUSAL = 0.5  # share of a square under its diagonal


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table.

    Attributes:
        kernel: Name of the op and direction.
        shape: What distinguishes this case.
        backend: The op's `implementation`.
        make: Draws the arguments.
        run: Maps the arguments to outputs.
        flops: Floating-point operations the mathematics needs; 0 for a kernel bound by bytes.
        n_bytes: Bytes that must be read and written once; 0 for a kernel bound by operations.
        reference: Computes the outputs in float32 from the first rows, or None.
        ceiling: Name of the ceiling that bounds it.
    """

    kernel: str
    shape: str
    backend: str
    make: Callable[[], Arrays]
    run: Callable[..., Any]
    flops: float = 0
    n_bytes: float = 0
    reference: Callable[..., tuple[Any, Any]] | None = None
    ceiling: str = "bf16 matmul"


def median_seconds(run: Callable[..., Any], arguments: Arrays, rounds: int) -> float:
    """Return the median over rounds of the mean time of back-to-back calls."""
    jax.block_until_ready(run(*arguments))
    began = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    calls = max(1, int(ROUND_S / max(time.perf_counter() - began, 1e-6)))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            out = run(*arguments)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / calls)
    return float(np.median(times))


def relative_error(got: Any, expected: Any) -> float:
    """Return the largest Frobenius error over outputs, each relative to its reference."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    return worst


def ceilings(rounds: int) -> dict[str, float]:
    """Measure operations and bytes a second of one large product and one large copy, random data."""
    a, b = (jax.random.normal(key, (8192, 8192), jnp.bfloat16) for key in keys(2))
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.bfloat16))
    product8 = jax.jit(lambda a, b: jnp.matmul(a, b.T, preferred_element_type=jnp.bfloat16))
    eight = tuple(x.astype(jnp.float8_e4m3fn) for x in (a, b))
    big = jax.random.normal(keys(1)[0], (2**29,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return {
        "bf16 matmul": 2 * 8192**3 / median_seconds(product, (a, b), rounds),
        "fp8 matmul": 2 * 8192**3 / median_seconds(product8, eight, rounds),
        "copy": 2 * big.nbytes / median_seconds(copy, (big,), rounds),
    }


def keys(n: int, seed: int = 0) -> jax.Array:
    """Return n random keys."""
    return jax.random.split(jax.random.key(seed), n)


def normal(seed: int, *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Arrays:
    """Draw standard normal arrays."""
    return tuple(
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys(len(shapes), seed), shapes, strict=True)
    )


def distinct_indices(n_rows: int, n_keys: int, n_slots: int) -> jax.Array:
    """Draw random distinct keys of each row, ascending as a selection gives them."""

    def row(key: jax.Array) -> jax.Array:
        order = jnp.argsort(jax.random.uniform(key, (n_keys,)))
        return jnp.sort(order[:n_slots]).astype(jnp.int32)

    return jax.lax.map(row, keys(n_rows, 7), batch_size=64)


def whole_range(n_rows: int, n_keys: int) -> dict[str, jax.Array]:
    """Let every query read every key."""
    return {"start": jnp.zeros(n_rows, jnp.int32), "end": jnp.full(n_rows, n_keys, jnp.int32)}


def causal_range(n_rows: int) -> dict[str, jax.Array]:
    """Let query t read keys 0 to t."""
    return {
        "start": jnp.zeros(n_rows, jnp.int32),
        "end": jnp.arange(1, n_rows + 1, dtype=jnp.int32),
    }


def sparse_cases(backends: tuple[str, ...]) -> Iterator[Case]:
    """Attention to 2048 listed rows, forward and backward."""
    dim = LATENT + ROPE
    options = {"scale": dim**-0.5, "value_dim": LATENT}
    for n_keys in (8192, 131072):

        def make(n_keys: int = n_keys) -> Arrays:
            q, kv, d_out = normal(
                1, (QUERIES, HEADS, dim), (n_keys, dim), (QUERIES, HEADS, LATENT)
            )
            return q, kv, distinct_indices(QUERIES, n_keys, SLOTS), d_out

        for backend in backends:
            attend = functools.partial(
                pallas_kernels.sparse_mla, **options, implementation=backend
            )

            def forward(q: jax.Array, kv: jax.Array, idx: jax.Array, _: jax.Array) -> Any:
                return attend(q, kv, idx)

            pairs = QUERIES * HEADS * SLOTS
            yield Case(
                kernel="sparse_mla forward",
                shape=f"T={QUERIES} H={HEADS} K={SLOTS} S={n_keys}",
                backend=backend,
                make=make,
                run=jax.jit(forward),
                flops=2 * pairs * (dim + LATENT),
            )
            yield Case(
                kernel="sparse_mla backward",
                shape=f"T={QUERIES} H={HEADS} K={SLOTS} S={n_keys}",
                backend=backend,
                make=make,
                run=jax.jit(forward),
                flops=2 * pairs * (3 * dim + 2 * LATENT),
            )
