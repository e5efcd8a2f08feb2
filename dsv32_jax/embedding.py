"""Look tokens up in a table whose columns are sharded, without the whole table on any device."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv32_jax import sharding
from dsv32_jax.sharding import RULES, spec


def lookup(
    table_VD: Float[Array, "V D"], tokens_BT: Int[Array, "B T"], dtype: DTypeLike
) -> Float[Array, "B T D"]:
    """Return each token's row.

    Every device looks the tokens of its column group up in its own columns, then the columns are exchanged for tokens:
    what travels is the result, forward and backward. Left to itself XLA gathers the table, or its gradient.

    Args:
        table_VD: float32 embedding.
        tokens_BT: int32 ids in [0, V).
        dtype: Of the rows.

    Returns:
        The rows, batch and sequence sharded. Where the mesh does not divide the shapes, XLA chooses what travels.
    """
    if not _divides(table_VD.shape, tokens_BT.shape):
        table = sharding.constrain(table_VD.astype(dtype), "vocab", None)
        return sharding.constrain(table[tokens_BT], "batch", "sequence", None)
    columns, rows = RULES["embed"], RULES["vocab"]

    def local(table: Array, tokens: Array) -> Array:
        if sharding.axis_size(*sharding.AXES) == 1:
            return table[tokens].astype(dtype)
        everyones = jax.lax.all_gather(tokens, columns)
        place = everyones - jax.lax.axis_index(rows) * table.shape[0]
        here = (place >= 0) & (place < table.shape[0])
        part = table.at[jnp.where(here, place, table.shape[0])].get(mode="fill", fill_value=0)
        part = jax.lax.psum(part.astype(dtype), rows)
        return jax.lax.all_to_all(part, columns, 0, part.ndim - 1, tiled=True)[0]

    token = spec("batch", "sequence")
    return sharding.shard_map(local, (spec("vocab", "embed"), token), token)(table_VD, tokens_BT)


def _divides(table: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    names = ("vocab", "embed", "batch", "sequence")
    return all(
        size % sharding.axis_size(*RULES[name]) == 0
        for size, name in zip((*table, *tokens), names, strict=True)
    )
