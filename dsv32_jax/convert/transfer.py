"""Move one part of a tensor between official rows and stored chunks, checking every value on the way."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

from dsv32_jax import errors
from dsv32_jax.convert import fp8_blocks, safetensors_io, slots
from dsv32_jax.convert.safetensors_io import Entry
from dsv32_jax.convert.slots import Slot
from dsv32_jax.convert.source import Found

BF16 = np.dtype(ml_dtypes.bfloat16)
BF16_EXPONENT = 0x7F80
SAFE_SCALE = float(np.finfo(np.float32).max) / fp8_blocks.E4M3_MAX  # above it products may overflow


def read_scales(found: Found, *, power_of_two: bool) -> Float[np.ndarray, "o i"] | None:
    """Read a tensor's scales.

    Args:
        found: The tensor.
        power_of_two: Refuse other scales, as the config's scale_fmt ue8m0 promises.

    Returns:
        float32 block scales, or None for a tensor that is not FP8.

    Raises:
        WorkFailedError: If a scale is not a positive finite number or, where asked for, no power of two.
    """
    if found.scale is None:
        return None
    scales = safetensors_io.read(found.scale)
    bad = ~(np.isfinite(scales) & (scales > 0))
    rule = "must be a positive finite number"
    if power_of_two and not bad.any():
        bad = np.frexp(scales)[0] != 0.5
        rule = "must be a power of two, as the config's scale_fmt ue8m0 says"
    if bad.any():
        row, column = map(int, np.argwhere(bad)[0])
        raise errors.WorkFailedError(
            f"{found.scale.file}: {found.scale.name}[{row}, {column}]={scales[row, column]} {rule}"
        )
    return scales


def read_part(
    slot: Slot,
    part: int,
    found: Found,
    scales: Float[np.ndarray, "o i"] | None,
    dtype: np.dtype,
) -> tuple[Shaped[np.ndarray, "..."], Float[np.ndarray, "p i"] | None]:
    """Read one part and turn it into what is stored.

    Args:
        slot: The tensor.
        part: Which part.
        found: Where its source is.
        scales: The source's scales, all of them; None for a source that is not FP8.
        dtype: What is stored: float8_e4m3fn, bfloat16 or float32.

    Returns:
        The part in our orientation, and its scales where it is stored as FP8.

    Raises:
        WorkFailedError: If a weight is not finite, or not any more in the stored dtype or times its scale.
    """
    rows = safetensors_io.read_rows(found.weight, part * slot.rows, slot.rows)
    if scales is not None:
        per_part = len(scales) // slot.parts
        scales = scales[part * per_part : (part + 1) * per_part]

    def check(at: slice) -> None:
        _check_finite(found.weight, part * slot.rows + at.start, rows[at])

    def check_wide(at: slice, wide: np.ndarray) -> None:
        _check_range(found.weight, part * slot.rows + at.start, wide)

    return store_rows(slot, rows, dtype, scales=scales, check=check, check_wide=check_wide)


def store_rows(
    slot: Slot,
    rows: Shaped[np.ndarray, "..."],
    dtype: np.dtype,
    *,
    scales: Float[np.ndarray, "o i"] | None = None,
    check: Callable[[slice], None] | None = None,
    check_wide: Callable[[slice, np.ndarray], None] | None = None,
) -> tuple[Shaped[np.ndarray, "..."], Float[np.ndarray, "o i"] | None]:
    """Turn a part's official rows into what is stored.

    Args:
        slot: The tensor.
        rows: The part's rows.
        dtype: What is stored: float8_e4m3fn, bfloat16 or float32.
        scales: The rows' own scales where they are FP8.
        check: Looks at a range of the rows before it is converted, and raises.
        check_wide: Looks at what became of a range, where that may have overflowed, and raises.

    Returns:
        The part in our orientation, and its scales where it is stored as FP8.
    """
    out_scales = np.empty(slot.scale_chunks[-2:], np.float32) if dtype == fp8_blocks.E4M3 else None

    def convert(at: slice) -> np.ndarray:
        if check is not None:
            check(at)
        block = rows[at]
        row = at.start // fp8_blocks.BLOCK
        row_scales = None if scales is None else scales[row : row + 1]
        if out_scales is None:
            wide = _widen(block, row_scales, dtype)
            if check_wide is not None and (row_scales is not None or dtype != block.dtype):
                check_wide(at, wide)
            return wide
        if row_scales is not None:
            out_scales[row] = row_scales[0]
            if check_wide is not None and row_scales.max() > SAFE_SCALE:
                check_wide(at, _widen(block, row_scales, slots.WIDE["float32"]))
            return block
        block, made = fp8_blocks.quantise(block.astype(np.float32))
        out_scales[row] = made[0]
        return block

    return oriented(slot, convert, dtype), out_scales


def oriented(
    slot: Slot, convert: Callable[[slice], Shaped[np.ndarray, "..."]], dtype: np.dtype
) -> Shaped[np.ndarray, "..."]:
    """Put converted blocks of official rows together in our orientation, one block at a time.

    Args:
        slot: The tensor.
        convert: Returns the converted rows of a range of a part's rows.
        dtype: What it returns.

    Returns:
        One part: [in, rows] for a matrix, [rows, ...] for the embedding and vectors.
    """
    rows, rest = slot.rows, slot.official[1:]
    if not slot.is_transposed:
        out = np.empty((rows, *rest), dtype)
        for at in slots.row_blocks(rows):
            out[at] = convert(at)
        return out
    out = np.empty((*rest, rows), dtype)
    unsigned = np.dtype(f"u{dtype.itemsize}")  # which numpy copies faster than ml_dtypes' own
    for at in slots.row_blocks(rows):
        block = convert(at).view(unsigned)
        for row in range(0, len(block), slots.TRANSPOSE_ROWS):
            some = block[row : row + slots.TRANSPOSE_ROWS]
            out.view(unsigned)[:, at.start + row : at.start + row + len(some)] = some.T
    return out


def _widen(
    block: Shaped[np.ndarray, "..."], scales: Float[np.ndarray, "1 i"] | None, dtype: np.dtype
) -> Shaped[np.ndarray, "..."]:
    with np.errstate(over="ignore", invalid="ignore"):  # callers look for what is not finite
        if scales is not None:
            block = fp8_blocks.dequantise(block, scales)
        return block.astype(dtype, copy=False)


def _check_range(entry: Entry, first_row: int, wide: Shaped[np.ndarray, "..."]) -> None:
    if _has_non_finite(wide):
        at = _position(first_row, np.argwhere(~np.isfinite(wide.astype(np.float32)))[0])
        raise errors.WorkFailedError(
            f"{entry.file}: {entry.name}[{at}], with its scale if any, is beyond the range of {wide.dtype}"
        )


def _check_finite(entry: Entry, first_row: int, block: Shaped[np.ndarray, "..."]) -> None:
    if _has_non_finite(block):
        where = np.argwhere(~np.isfinite(block.astype(np.float32)))[0]
        raise errors.WorkFailedError(
            f"{entry.file}: {entry.name}[{_position(first_row, where)}]={float(block[tuple(where)])} "
            "is not a finite number"
        )


def _has_non_finite(block: Shaped[np.ndarray, "..."]) -> bool:
    if block.dtype == fp8_blocks.E4M3:
        return fp8_blocks.has_nan(block)
    if block.dtype == BF16:
        return bool(((block.view(np.uint16) & BF16_EXPONENT) == BF16_EXPONENT).any())
    return not np.isfinite(block).all()


def _position(first_row: int, where: np.ndarray) -> str:
    return ", ".join(map(str, (first_row + where[0], *where[1:])))


def write_part(
    slot: Slot,
    chunk: Shaped[np.ndarray, "..."],
    scales: Float[np.ndarray, "o i"] | None,
    dtype: np.dtype,
) -> tuple[Shaped[np.ndarray, "..."], Float[np.ndarray, "o i"] | None]:
    """Turn a stored part into official rows.

    Args:
        slot: The tensor.
        chunk: The stored part: FP8 with scales, or wider.
        scales: Its scales, official block rows of this part; None where the chunk is not FP8.
        dtype: What the official file holds.

    Returns:
        Rows [rows, in], and their scales where the file holds FP8.

    Raises:
        WorkFailedError: If a value is not finite, or not within the official dtype's range.
    """
    rows = slot.to_official(chunk)
    if dtype == fp8_blocks.E4M3 and scales is not None:
        return rows, scales
    out = np.empty(rows.shape, dtype)
    made = np.empty(slot.scale_chunks[-2:], np.float32) if dtype == fp8_blocks.E4M3 else None
    for number, at in enumerate(slots.row_blocks(len(rows))):
        row_scales = None if scales is None else scales[number : number + 1]
        if made is None:
            out[at] = _widen(rows[at], row_scales, dtype)
            _check_stored(slot, out[at])
            continue
        block = rows[at].astype(np.float32)
        _check_stored(slot, block)
        out[at], made[number : number + 1] = fp8_blocks.quantise(block)
    return out, made


def _check_stored(slot: Slot, block: Shaped[np.ndarray, "..."]) -> None:
    if not np.isfinite(block.astype(np.float32, copy=False)).all():
        raise errors.WorkFailedError(
            f"{slot.name}: the checkpoint's {slot.place.path}{list(slot.place.indices)} holds a value that is not "
            "finite in the wanted dtype"
        )


def check_copy(slot: Slot, copy: Entry, original: Entry) -> None:
    """Compare the MTP layer's embedding or head with the main model's, which stands for both.

    Args:
        slot: The copy.
        copy: Where it is.
        original: Where the main model's tensor is.

    Raises:
        WorkFailedError: If they differ; where one of them is not finite there, that is said, as it is why.
    """
    for part in range(slot.parts):
        at = (part * slot.rows, slot.rows)
        left, right = (safetensors_io.read_rows(entry, *at) for entry in (copy, original))
        if left.dtype != right.dtype:
            left, right = left.astype(np.float32), right.astype(np.float32)
        unsigned = np.dtype(f"u{left.dtype.itemsize}")
        if not np.array_equal(left.view(unsigned), right.view(unsigned)):
            _check_finite(original, at[0], right)
            _check_finite(copy, at[0], left)
            raise errors.WorkFailedError(
                f"{copy.file}: {copy.name} differs from the main model's {original.name} in {original.file}, "
                "which it must repeat"
            )
