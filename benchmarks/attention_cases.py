"""Attention and its indexer's losses, as `benchmarks/kernels.py` times them."""

import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from kernel_cases import (
    HEADS,
    INDEX_DIM,
    INDEX_HEADS,
    LATENT,
    NOPE,
    QUERIES,
    ROPE,
    SLOTS,
    VALUE,
    Arrays,
    Case,
    distinct_indices,
    forward_and_backward,
    loss_and_gradients,
    normal,
)

import pallas_kernels


def sparse_mla_cases() -> Iterator[Case]:
    """Attention to 2048 listed rows."""
    dim = LATENT + ROPE
    op = functools.partial(pallas_kernels.sparse_mla, scale=dim**-0.5, value_dim=LATENT)
    work = 2 * QUERIES * HEADS * SLOTS
    for n_keys, backend in itertools.product((8192, 131072), ("gluon_gpu", "pallas_gpu")):

        def draw(n_queries: int, n_keys: int = n_keys) -> tuple[Arrays, Arrays, jax.Array]:
            shapes = (n_queries, HEADS, dim), (n_keys, dim), (n_queries, HEADS, LATENT)
            q, kv, d_out = normal(1, *shapes)
            return (q, kv), (distinct_indices(n_queries, n_keys, SLOTS),), d_out

        shape = f"T={QUERIES} H={HEADS} K={SLOTS} S={n_keys}"
        flops = work * (dim + LATENT), work * (3 * dim + 2 * LATENT)
        yield from forward_and_backward(
            "sparse_mla", op, backend, shape, draw, (QUERIES, 64), flops
        )


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array, *, scale: float
) -> tuple[jax.Array, None]:
    """Attend by cuDNN, which wants values as wide as keys: they are padded."""
    padded = jnp.pad(v, ((0, 0), (0, 0), (0, k.shape[-1] - v.shape[-1])))
    options = {"scale": scale, "is_causal": True, "implementation": "cudnn"}
    out = jax.nn.dot_product_attention(q[None], k[None], padded[None], **options)
    return out[0, :, :, : v.shape[-1]], None


def dense_mla_cases() -> Iterator[Case]:
    """Causal attention in MHA form, beside cuDNN's."""
    dim = NOPE + ROPE

    def op(*arrays: jax.Array, implementation: str) -> tuple[jax.Array, jax.Array | None]:
        q, k, v, end = arrays
        if implementation == "cudnn":
            return cudnn_attention(q, k, v, end, scale=dim**-0.5)
        options = {"scale": dim**-0.5, "start": jnp.zeros_like(end), "end": end, "causal": True}
        return pallas_kernels.dense_mla(q, k, v, **options, implementation=implementation)

    def draw(n: int) -> tuple[Arrays, Arrays, jax.Array]:
        q, k, v, d_out = normal(2, *((n, HEADS, dim),) * 2, *((n, HEADS, VALUE),) * 2)
        return (q, k, v), (jnp.arange(1, n + 1, dtype=jnp.int32),), d_out

    for n, backend in itertools.product((4096, 8192), ("pallas_gpu", "cudnn")):
        pairs = n * (n + 1) // 2 * HEADS
        flops = 2 * pairs * (dim + VALUE), 2 * pairs * (3 * dim + 2 * VALUE)
        yield from forward_and_backward(
            "dense_mla", op, backend, f"T=S={n} H={HEADS} causal", draw, (n, 512), flops
        )


def indexer_kl_cases() -> Iterator[Case]:
    """The warm-up's loss over causal ranges, and its gradients."""
    n, dim = 8192, NOPE + ROPE

    def op(*arrays: jax.Array, implementation: str) -> jax.Array:
        *tensors, end = arrays
        options = {"scale": dim**-0.5, "start": jnp.zeros_like(end), "end": end, "causal": True}
        return pallas_kernels.indexer_kl(*tensors, **options, implementation=implementation)

    def draw(n: int) -> Arrays:
        shapes = (n, INDEX_HEADS, INDEX_DIM), (n, INDEX_DIM), (n, HEADS, dim), (n, HEADS, dim)
        q, k, attn_q, attn_k = normal(6, *shapes)
        (w,) = normal(7, (n, INDEX_HEADS), dtype=jnp.float32)
        end = jnp.arange(1, n + 1, dtype=jnp.int32)
        v = attn_k[..., :VALUE]
        _, lse = pallas_kernels.dense_mla(
            *(attn_q, attn_k, v), scale=dim**-0.5, start=jnp.zeros_like(end), end=end, causal=True
        )
        return q, k, w * (INDEX_HEADS * INDEX_DIM) ** -0.5, attn_q, attn_k, lse, end

    pairs = n * (n + 1) // 2
    forward = 2 * pairs * (HEADS * dim + INDEX_HEADS * INDEX_DIM)
    shape = f"T=S={n} H={HEADS} J={INDEX_HEADS} causal"
    yield from loss_and_gradients("indexer_kl", op, "pallas_gpu", shape, draw, (n, 512), forward)


def sparse_indexer_kl_cases() -> Iterator[Case]:
    """The sparse stage's loss over listed keys, and its gradients."""
    dim = LATENT + ROPE

    def op(*arrays: jax.Array, implementation: str) -> jax.Array:
        return pallas_kernels.sparse_indexer_kl(
            *arrays, scale=dim**-0.5, implementation=implementation
        )

    for n_keys in (8192, 131072):

        def draw(n: int, n_keys: int = n_keys) -> Arrays:
            shapes = (n, INDEX_HEADS, INDEX_DIM), (n_keys, INDEX_DIM), (n, HEADS, dim)
            q, k, attn_q, kv = normal(8, *shapes, (n_keys, dim))
            (w,) = normal(9, (n, INDEX_HEADS), dtype=jnp.float32)
            index = distinct_indices(n, n_keys, SLOTS)
            _, lse = pallas_kernels.sparse_mla(attn_q, kv, index, scale=dim**-0.5, value_dim=LATENT)
            return q, k, w * (INDEX_HEADS * INDEX_DIM) ** -0.5, attn_q, kv, lse, index

        forward = 2 * QUERIES * SLOTS * (HEADS * dim + INDEX_HEADS * INDEX_DIM)
        shape = f"T={QUERIES} H={HEADS} J={INDEX_HEADS} K={SLOTS} S={n_keys}"
        yield from loss_and_gradients(
            "sparse_indexer_kl", op, "gluon_gpu", shape, draw, (QUERIES, 64), forward
        )


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "sparse_mla": sparse_mla_cases,
    "dense_mla": dense_mla_cases,
    "indexer_kl": indexer_kl_cases,
    "sparse_indexer_kl": sparse_indexer_kl_cases,
}
