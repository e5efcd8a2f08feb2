"""How the rows of a paged cache lie in memory: in parts, as GPUs read them, or in records, as a TPU copies them.

A TPU's copy moves whole lines of 128 words of 32 bits, so all that a token leaves is one record of such lines. Values
fill words in tiles of 128: the word at a lane holds that lane of as many tiles as it has room for, the first of them in
its lowest bits.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import padding
from pallas_kernels.fp8 import op as fp8

LANES = 128
WORD_BYTES = 4


class Format(NamedTuple):
    """What a row holds.

    Attributes:
        latent_dim: Columns of the latent.
        rope_dim: Columns of the rope key.
        dtype: Name of the rope key's dtype, and of the latent's where that is not quantised.
        quantised: Whether the latent is float8_e4m3fn, with a power-of-two scale for each 128 columns.
    """

    latent_dim: int
    rope_dim: int
    dtype: str
    quantised: bool = False

    @property
    def latent_dtype(self) -> str:
        """Name of the latent's dtype."""
        return "float8_e4m3fn" if self.quantised else self.dtype

    @property
    def n_scales(self) -> int:
        """Scales of a row."""
        return max(self.latent_dim // fp8.FP8_BLOCK, 1) if self.quantised else 0

    @property
    def latent_width(self) -> int:
        """Columns of the latent's whole tiles."""
        return -(-self.latent_dim // LANES) * LANES

    @property
    def rope_width(self) -> int:
        """Columns of the rope key's whole tiles."""
        return -(-self.rope_dim // LANES) * LANES

    @property
    def sections(self) -> list[tuple[str, int]]:
        """Dtypes of a record's parts, each in lines of its own, and their columns, in whole tiles.

        The latent and the rope key; or the quantised latent, then the rope key and a tile that starts with the scales.
        """
        if not self.quantised:
            return [(self.dtype, self.latent_width + self.rope_width)]
        scales = -(-self.n_scales // LANES) * LANES
        return [(self.latent_dtype, self.latent_width), (self.dtype, self.rope_width + scales)]

    @property
    def lines(self) -> int:
        """Lines of 128 words of a record."""
        return sum(_lines(dtype, width) for dtype, width in self.sections)


class Parts(NamedTuple):
    """A cache of N rows in arrays of its parts.

    Attributes:
        latent: [N, C], float, or float8_e4m3fn with scales.
        rope: [N, R], float.
        scale: float32 [N, G], one power of two per block of C / G latent columns; None for an unquantised latent.
    """

    latent: Float[Array, "N C"]
    rope: Float[Array, "N R"]
    scale: Float[Array, "N G"] | None = None

    @property
    def format(self) -> Format:
        """What a row holds."""
        widths = self.latent.shape[1], self.rope.shape[1]
        return Format(*widths, self.rope.dtype.name, self.latent.dtype.itemsize == 1)

    @property
    def n_rows(self) -> int:
        """Rows of the cache."""
        return self.rope.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Records:
    """A cache of N rows, one record of L lines each.

    Attributes:
        words: int32 [N * L, 128].
        format: What a record holds.
    """

    words: Any  # an array, or what trees of shapes and of places have in its stead
    format: Format = dataclasses.field(metadata={"static": True})

    @property
    def n_rows(self) -> int:
        """Rows of the cache."""
        return self.words.shape[0] // self.format.lines


def empty_parts(n_rows: int, row: Format) -> Parts:
    """Return a cache of zeros in parts."""
    scale = jnp.zeros((n_rows, row.n_scales), jnp.float32) if row.quantised else None
    latent = jnp.zeros((n_rows, row.latent_dim), row.latent_dtype)
    return Parts(latent, jnp.zeros((n_rows, row.rope_dim), row.dtype), scale)


def empty_records(n_rows: int, row: Format) -> Records:
    """Return a cache of zeros in records."""
    return Records(jnp.zeros((n_rows * row.lines, LANES), jnp.int32), row)


def write(
    cache: Parts | Records,
    rows_N: Int[Array, " N"],
    latent_NC: Float[Array, "N C"],
    rope_NR: Float[Array, "N R"],
) -> Parts | Records:
    """Replace rows of a cache; a quantised one rounds the latents as `fp8.quantize` does.

    Args:
        cache: The cache.
        rows_N: int32 row of each token, all different; -1 writes nothing.
        latent_NC: Latents.
        rope_NR: Rope keys.

    Returns:
        The cache with the rows replaced.
    """
    latent, scale = fp8.quantize(latent_NC) if cache.format.quantised else (latent_NC, None)
    if isinstance(cache, Parts):
        kept = None if scale is None or cache.scale is None else put(cache.scale, rows_N, scale)
        return Parts(put(cache.latent, rows_N, latent), put(cache.rope, rows_N, rope_NR), kept)
    lines = cache.format.lines
    line_NL = rows_N[:, None] * lines + jnp.arange(lines, dtype=jnp.int32)
    records = _pack(cache.format, latent, rope_NR, scale)
    words = put(cache.words, line_NL.reshape(-1), records.reshape(-1, LANES))
    return dataclasses.replace(cache, words=words)


def put(array: Array, rows_N: Int[Array, " N"], values: Array) -> Array:
    """Replace rows of an array, cast to its dtype; those of negative rows go nowhere."""
    # A negative row would count from the end, so it goes past it, where writes are dropped.
    rows = jnp.where(rows_N < 0, array.shape[0], rows_N)
    return array.at[rows].set(values.astype(array.dtype), mode="drop")


def read(
    cache: Parts | Records, rows: Int[Array, "*B"]
) -> tuple[Float[Array, "*B C"], Float[Array, "*B R"]]:
    """Return latents, dequantised, and rope keys of rows, in the rope key's dtype.

    Args:
        cache: The cache.
        rows: int32 rows; one outside [0, N) reads zeros, whatever the cache holds.

    Returns:
        (latents, rope keys).
    """
    # Zeros, not some masked row: a weight of 0 times a NaN row would be NaN.
    rows = jnp.where((rows >= 0) & (rows < cache.n_rows), rows, cache.n_rows)
    if isinstance(cache, Parts):
        latent, rope = _take(cache.latent, rows), _take(cache.rope, rows)
        scale = None if cache.scale is None else _take(cache.scale, rows)
    else:
        lines = cache.format.lines
        words = _take(cache.words, rows[..., None] * lines + jnp.arange(lines, dtype=jnp.int32))
        latent, rope, scale = _unpack(cache.format, words)
    if scale is not None:
        latent = fp8.dequantize(latent, scale).astype(cache.format.dtype)
    return latent, rope


def _take(array: Array, rows: Array) -> Array:
    return array.at[rows].get(mode="fill", fill_value=0)


def _lines(dtype: str, width: int) -> int:
    """Return the lines that so many columns fill."""
    return -(-width * jnp.dtype(dtype).itemsize // (LANES * WORD_BYTES))


def _pack(row: Format, latent_NC: Array, rope_NR: Array, scale_NG: Array | None) -> Array:
    """Return int32 records [N, L, 128]."""
    latent = padding.pad_columns(latent_NC.astype(row.latent_dtype), row.latent_width)
    rope = padding.pad_columns(rope_NR.astype(row.dtype), row.rope_width)
    if scale_NG is None:
        return _to_words(jnp.concatenate([latent, rope], axis=1))
    # A power of two is exact in each of these dtypes.
    rest = jnp.concatenate([rope, scale_NG.astype(row.dtype)], axis=1)
    return jnp.concatenate([_to_words(latent), _to_words(rest)], axis=1)


def _unpack(row: Format, words: Array) -> tuple[Array, Array, Array | None]:
    """Return latents, rope keys and scales of records [..., L, 128]."""
    (dtype, width), *_ = row.sections
    first = _lines(dtype, width)
    values = _from_words(words[..., :first, :], dtype)
    latent = values[..., : row.latent_dim]
    if not row.quantised:
        return latent, values[..., row.latent_width :][..., : row.rope_dim], None
    rest = _from_words(words[..., first:, :], row.dtype)
    scale = rest[..., row.rope_width :][..., : row.n_scales].astype(jnp.float32)
    return latent, rest[..., : row.rope_dim], scale


def _to_words(values: Float[Array, "N D"]) -> Int[Array, "N L 128"]:
    """Fill lines of words with values."""
    size = values.dtype.itemsize
    per_word = WORD_BYTES // size
    lines = _lines(values.dtype.name, values.shape[1])
    bits = lax.bitcast_convert_type(
        padding.pad_columns(values, lines * per_word * LANES), f"uint{8 * size}"
    )
    tiles = bits.astype(jnp.uint32).reshape(-1, lines, per_word, LANES)
    words = sum(tiles[:, :, b] << (8 * size * b) for b in range(per_word))
    return lax.bitcast_convert_type(words, jnp.int32)


def _from_words(words: Int[Array, "*N L 128"], dtype: str) -> Float[Array, "*N D"]:
    """Undo `_to_words`, with the columns that fill the last line."""
    size = jnp.dtype(dtype).itemsize
    bits = lax.bitcast_convert_type(words, jnp.uint32)
    tiles = [(bits >> (8 * size * b)).astype(f"uint{8 * size}") for b in range(WORD_BYTES // size)]
    values = lax.bitcast_convert_type(jnp.stack(tiles, axis=-2), dtype)
    return values.reshape(*words.shape[:-2], math.prod(values.shape[-3:]))
