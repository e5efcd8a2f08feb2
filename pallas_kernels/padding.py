"""Columns of zeros, by which kernels made for few widths take narrower rows: they change no product of two rows."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def least(width: int, widths: tuple[int, ...], name: str) -> int:
    """Return the least of the widths that a row fits.

    Args:
        width: Columns of the row.
        widths: What a kernel takes, ascending.
        name: What the columns are, for the error.

    Raises:
        NotImplementedError: If all are too narrow.
    """
    for candidate in widths:
        if width <= candidate:
            return candidate
    raise NotImplementedError(f"takes up to {widths[-1]} {name}, got {width}")


def pad_columns(x: Shaped[Array, "*R D"], width: int) -> Shaped[Array, "*R W"]:
    """Append zeros up to `width` columns."""
    extra = width - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, extra),)) if extra else x


def spread(
    x: Shaped[Array, "*R D"], value_dim: int, widths: tuple[int, int]
) -> Shaped[Array, "*R W"]:
    """Pad both parts of rows: the first `value_dim` columns to widths[0], the rest to widths[1]."""
    if (value_dim, x.shape[-1] - value_dim) == widths:
        return x
    parts = x[..., :value_dim], x[..., value_dim:]
    padded = [pad_columns(part, width) for part, width in zip(parts, widths, strict=True)]
    return jnp.concatenate(padded, axis=-1)


def gather(
    x: Shaped[Array, "*R W"], value_dim: int, dim: int, widths: tuple[int, int]
) -> Shaped[Array, "*R D"]:
    """Undo `spread` of rows of `dim` columns."""
    if (value_dim, dim - value_dim) == widths:
        return x
    rest = x[..., widths[0] : widths[0] + dim - value_dim]
    return jnp.concatenate([x[..., :value_dim], rest], axis=-1)
