"""What a case of `benchmarks/kernels.py` is, the released model's sizes, and how problems are drawn and compared."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = tuple[Any, ...]
QUERIES, HEADS, SLOTS = 4096, 128, 2048  # the 671B model's attention, one piece of 4096 tokens
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
INDEX_HEADS, INDEX_DIM = 64, 128


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table.

    Attributes:
        kernel: Name of the op and direction.
        shape: What distinguishes this case.
        backend: The op's `implementation`.
        make: Draws the arguments.
        run: Maps the arguments to outputs.
        work: Floating-point operations that the mathematics needs, or bytes that must be read and written once.
        ceiling: What bounds it: "bf16 matmul", "fp8 matmul" or "copy".
        error: Measures the error of a smaller problem, or None.
    """

    kernel: str
    shape: str
    backend: str
    make: Callable[[], Arrays]
    run: Callable[..., Any]
    work: float
    ceiling: str = "bf16 matmul"
    error: Callable[[], float] | None = None


def relative_error(got: Any, expected: Any) -> float:
    """Return the largest Frobenius error over outputs, each relative to its reference."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    return worst


def keys(n: int, seed: int = 0) -> jax.Array:
    """Return n random keys."""
    return jax.random.split(jax.random.key(seed), n)


def normal(seed: int, *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Arrays:
    """Draw standard normal arrays."""
    drawn = zip(keys(len(shapes), seed), shapes, strict=True)
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in drawn)


def float32(tree: Any) -> Any:
    """Raise every low-precision array to float32."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def distinct_indices(n_rows: int, n_keys: int, n_slots: int) -> jax.Array:
    """Draw random distinct keys of each row, ascending as a selection gives them."""

    def row(key: jax.Array) -> jax.Array:
        order = jnp.argsort(jax.random.uniform(key, (n_keys,)))
        return jnp.sort(order[:n_slots]).astype(jnp.int32)

    return jax.jit(lambda k: jax.lax.map(row, k, batch_size=64))(keys(n_rows, 7))


def forward_and_backward(
    name: str,
    op: Callable[..., tuple[jax.Array, jax.Array]],
    backend: str,
    shape: str,
    draw: Callable[[int], tuple[Arrays, Arrays, jax.Array]],
    sizes: tuple[int, int],
    flops: tuple[float, float],
) -> Iterator[Case]:
    """Make the two cases of an attention op.

    Args:
        name: The op's name.
        op: Maps (differentiable inputs, other inputs) to (out, lse); takes `implementation`.
        backend: The implementation.
        shape: The table's description.
        draw: Draws (differentiable inputs, other inputs, cotangent of out) for a number of queries.
        sizes: Queries of the timed problem and of the one whose error is measured.
        flops: Operations forward and backward.
    """
    fast = functools.partial(op, implementation=backend)
    plain = functools.partial(op, implementation="reference")

    def gradients(attend: Callable, inputs: Arrays, others: Arrays, d_out: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *x: attend(*x, *others)[0], *inputs)
        return pull(d_out.astype(out.dtype))

    def forward_error() -> float:
        inputs, others, _ = draw(sizes[1])
        expected, _ = jax.jit(plain)(*float32(inputs), *others)
        return relative_error(jax.jit(fast)(*inputs, *others)[0], expected)

    def backward_error() -> float:
        inputs, others, d_out = draw(sizes[1])
        got = jax.jit(functools.partial(gradients, fast))(inputs, others, d_out)
        reference = jax.jit(functools.partial(gradients, plain))
        return relative_error(got, reference(float32(inputs), others, float32(d_out)))

    def residuals() -> Arrays:
        inputs, others, d_out = draw(sizes[0])
        pull = jax.jit(lambda i, o: jax.vjp(lambda *x: fast(*x, *o)[0], *i)[1])(inputs, others)
        return pull, d_out

    def arguments() -> Arrays:
        inputs, others, _ = draw(sizes[0])
        return (*inputs, *others)

    common = {"shape": shape, "backend": backend}
    yield Case(
        kernel=f"{name} forward",
        make=arguments,
        run=jax.jit(fast),
        work=flops[0],
        error=forward_error,
        **common,
    )
    yield Case(
        kernel=f"{name} backward",
        make=residuals,
        run=jax.jit(lambda pull, d_out: pull(d_out)),
        work=flops[1],
        error=backward_error,
        **common,
    )


def loss_and_gradients(
    name: str,
    op: Callable[..., jax.Array],
    backend: str,
    shape: str,
    draw: Callable[[int], Arrays],
    sizes: tuple[int, int],
    flops: float,
) -> Iterator[Case]:
    """Make the two cases of a loss; the second computes the gradients of the mean by its first three arguments."""
    fast = functools.partial(op, implementation=backend)
    plain = functools.partial(op, implementation="reference")

    def gradients(loss: Callable[..., jax.Array], *arguments: jax.Array) -> Any:
        return jax.grad(lambda *x: jnp.mean(loss(*x, *arguments[3:])), (0, 1, 2))(*arguments[:3])

    for kind, form in (
        ("loss", lambda f: f),
        ("gradients", lambda f: functools.partial(gradients, f)),
    ):

        def error(form: Callable = form) -> float:
            small = draw(sizes[1])
            return relative_error(
                jax.jit(form(fast))(*small), jax.jit(form(plain))(*float32(small))
            )

        yield Case(
            kernel=f"{name} {kind}",
            shape=shape,
            backend=backend,
            make=functools.partial(draw, sizes[0]),
            run=jax.jit(form(fast)),
            work=flops,
            error=error,
        )
