"""What the TPU kernels of several ops share: tiles that ranges of keys touch, products, limits."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

Ref = Any  # a Pallas reference; it has no public type

LANES = 128
VMEM_LIMIT = 56 * 2**20  # v5p and tpu7x have 64 MiB; what is left is the compiler's
MASKED = -1e30  # logit of a pair that may not attend
FLOOR = (
    -5e29
)  # peak before any key: exp(MASKED - FLOOR) is 0, so that masked pairs need no second select
LAST_TO_LAST = (1, 1)
FIRST_TO_FIRST = (0, 0)
ROWS_BY_COLUMNS = (1, 0)


class Spans(NamedTuple):
    """Blocks [first, last) of one axis that each block of the other axis touches; an empty span is [0, 0)."""

    first: Int[Array, " N"]
    last: Int[Array, " N"]


def round_up(n: int, multiple: int) -> int:
    """Return the least multiple that is not below n."""
    return -(-n // multiple) * multiple


def pad_rows(x: Shaped[Array, " N *R"], n_rows: int) -> Shaped[Array, " M *R"]:
    """Append zero rows, so that no kernel reads past an array's end: what lies there could be NaN."""
    extra = n_rows - x.shape[0]
    return jnp.pad(x, ((0, extra), *((0, 0),) * (x.ndim - 1))) if extra else x


def heads_first(x_THD: Shaped[Array, "T H D"], n_rows: int) -> Shaped[Array, "H N D"]:
    """Move heads to the front, so that a head's rows are tiles, and append zero rows."""
    return jnp.swapaxes(pad_rows(x_THD, n_rows), 0, 1)


def key_spans(
    start_T: Int[Array, " T"], end_T: Int[Array, " T"], block_q: int, block_k: int
) -> Spans:
    """Return which blocks of keys each block of queries reads.

    Args:
        start_T: int32, first key of each query, T a multiple of block_q.
        end_T: int32, one past the last key.
        block_q: Queries of a block.
        block_k: Keys of a block.
    """
    some = end_T > start_T
    first = jnp.where(some, start_T // block_k, jnp.iinfo(jnp.int32).max)
    last = jnp.where(some, -(-end_T // block_k), 0)
    last_N = jnp.max(last.reshape(-1, block_q), axis=1)
    first_N = jnp.minimum(jnp.min(first.reshape(-1, block_q), axis=1), last_N)
    return Spans(first_N.astype(jnp.int32), last_N.astype(jnp.int32))


def query_spans(of_keys: Spans, n_key_blocks: int) -> Spans:
    """Turn `key_spans` around: which blocks of queries read each block of keys, from the first to the last."""
    key = jnp.arange(n_key_blocks, dtype=jnp.int32)[:, None]
    used = (of_keys.first <= key) & (key < of_keys.last)
    n_query_blocks = used.shape[1]
    some = jnp.any(used, axis=1)
    first = jnp.where(some, jnp.argmax(used, axis=1), 0)
    last = jnp.where(some, n_query_blocks - jnp.argmax(used[:, ::-1], axis=1), 0)
    return Spans(first.astype(jnp.int32), last.astype(jnp.int32))


def block_of_step(first: Ref, last: Ref, row: Any, step: Any) -> Any:
    """Return the block that a step of a span works on; after the span's end the last one again, which is not loaded."""
    return jnp.minimum(first[row] + step, jnp.maximum(last[row] - 1, 0))


def dot(
    a: Float[Array, "..."], b: Float[Array, "..."], contract: tuple[int, int]
) -> Float[Array, "..."]:
    """Multiply two tiles over one axis of each, in float32; float32 tiles keep all their bits."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    axes = ((contract[0],), (contract[1],))
    return lax.dot_general(
        a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def total_bytes(*arrays: Any) -> int:
    """Return the bytes of arrays, or of what has their shapes and dtypes."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)


def check_floats(*arrays: Any) -> None:
    """Raise NotImplementedError unless all arrays are bfloat16 or all are float32, and none is empty."""
    dtypes = {jnp.dtype(x.dtype) for x in arrays}
    if dtypes not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float32)}):
        names = ", ".join(str(x.dtype) for x in arrays)
        raise NotImplementedError(f"takes bfloat16 or float32, all alike, got {names}")
    if any(0 in x.shape for x in arrays):
        raise NotImplementedError("an axis of length 0")
