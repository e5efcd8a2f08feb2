"""How each official tensor is stored here: its slice of a stacked parameter, cut into parts that are moved one by one.

A part is a range of an official tensor's rows (its output features), which is contiguous in the official file, and one
chunk of the stored parameter, which is contiguous in ours.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from dsv32_jax import parameters
from dsv32_jax.config import ModelConfig
from dsv32_jax.convert import fp8_blocks
from dsv32_jax.convert.names import Place, places

StoredDtype = Literal["fp8", "bf16", "float32"]
WIDE = {"bf16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
# Matrices that the official checkpoints keep in bf16. Source: facts of DeepSeek-V3.2's files, FP8 section.
UNQUANTISED = ("embed", "head", "gate.weight", "indexer.weights_proj", "mtp.eh_proj")
SCALE_SUFFIX = "_scale_inv"
PART_ELEMENTS = 32 << 20
TRANSPOSE_ROWS = 64  # so many rows stay in the cache while they become columns


@dataclass(frozen=True)
class Slot:
    """An official tensor and where it goes.

    Attributes:
        name: The official name.
        place: The parameter and the leading indices into it.
        shape: The parameter's own shape, leading axes included.
        parts: Into how many row ranges the tensor is cut.
    """

    name: str
    place: Place
    shape: tuple[int, ...]
    parts: int

    @property
    def own(self) -> tuple[int, ...]:
        """Shape of the slice that this tensor fills."""
        return self.shape[len(self.place.indices) :]

    @property
    def official(self) -> tuple[int, ...]:
        """Shape of the official tensor."""
        return official_shape(self.place.path, self.own)

    @property
    def quantised(self) -> bool:
        """Whether official FP8 checkpoints hold it in FP8."""
        return len(self.own) > 1 and not self.place.path.endswith(UNQUANTISED)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the stacked scales of the whole parameter, official blocks in the last two axes."""
        stack = self.shape[: len(self.place.indices)]
        return (*stack, *(fp8_blocks.blocks(n) for n in self.official))

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of one stored chunk."""
        own = list(self.own)
        own[_split_axis(self.place.path, self.own)] //= self.parts
        return (*(1 for _ in self.place.indices), *own)

    @property
    def scale_chunks(self) -> tuple[int, ...]:
        """Shape of one stored chunk of scales."""
        *stack, out, n_in = self.scale_shape
        return (*(1 for _ in stack), out // self.parts, n_in)

    @property
    def rows(self) -> int:
        """Official rows of one part."""
        return self.official[0] // self.parts

    def index(self, part: int) -> tuple[int, ...]:
        """Return a part's position in the grid of chunks."""
        own = [0] * len(self.own)
        own[_split_axis(self.place.path, self.own)] = part
        return (*self.place.indices, *own)

    def slices(self, part: int) -> tuple[slice, ...]:
        """Return a part's range along each axis of the parameter."""
        return _slices(self.index(part), self.chunks)

    def scale_slices(self, part: int) -> tuple[slice, ...]:
        """Return the range of a part's scales along each axis of the stacked scales."""
        return _slices(self.scale_index(part), self.scale_chunks)

    def scale_index(self, part: int) -> tuple[int, ...]:
        """Return the position of a part's scales in their grid of chunks."""
        return (*self.place.indices, part, 0)

    def to_official(self, chunk: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """Turn a stored chunk into official rows."""
        if len(self.own) == 1 or self.place.path == "embed":
            return chunk.reshape(self.rows, *self.official[1:])
        return transpose(chunk.reshape(self.official[1], self.rows))

    @property
    def is_transposed(self) -> bool:
        """Whether the official [out, in] becomes [in, out] here."""
        return len(self.own) > 1 and self.place.path != "embed"


def slots(cfg: ModelConfig) -> dict[str, Slot]:
    """List every official tensor of a model.

    Args:
        cfg: The model.

    Returns:
        Slots by official name, in the order layer by layer; without scales.
    """
    shapes = parameters.abstract(cfg)
    shapes_by_name = {name: tuple(x.shape) for group in shapes for name, x in group.items()}
    made = {}
    for name, place in places(cfg).items():
        shape = shapes_by_name[place.path]
        own = shape[len(place.indices) :]
        made[name] = Slot(name, place, shape, _parts(place.path, own, PART_ELEMENTS))
    return made


def original(table: Mapping[str, Slot], copy: Slot) -> Slot:
    """Return the tensor that a copy repeats."""
    path = copy.place.path
    return next(s for s in table.values() if s.place.path == path and not s.place.copy)


def _slices(index: tuple[int, ...], chunks: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True))


def official_shape(path: str, own: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape an official tensor of a parameter has.

    Args:
        path: The parameter.
        own: Its shape here, without layers and experts.

    Returns:
        [out, in], but [vocab, dim] for the embedding and one axis for vectors.
    """
    if path == "embed" or len(own) == 1:
        return own
    n_in = math.prod(own[: input_axes(path, own)])
    return (math.prod(own) // n_in, n_in)


def input_axes(path: str, own: tuple[int, ...]) -> int:
    """Return how many leading axes of a matrix, as it is here, are official input features; the rest are output."""
    return len(own) - 1 if path.endswith("attn.wo") else 1


def _split_axis(path: str, own: tuple[int, ...]) -> int:
    """Return the axis that official rows run along first."""
    if path == "embed" or len(own) == 1:
        return 0
    return input_axes(path, own)


@functools.cache
def _parts(path: str, own: tuple[int, ...], most: int) -> int:
    """Cut a large matrix into the fewest equal parts that are small enough and begin at FP8 blocks."""
    if len(own) == 1:
        return 1
    axis = own[_split_axis(path, own)]
    rows = official_shape(path, own)[0]
    low = [n for n in range(1, math.isqrt(axis) + 1) if axis % n == 0]
    divisors = sorted({*low, *(axis // n for n in low)})
    fitting = [n for n in divisors if rows // n % fp8_blocks.BLOCK == 0]
    small = [n for n in fitting if math.prod(own) // n <= most]
    return min(small, default=max(fitting, default=1))


def transpose(x: Shaped[np.ndarray, "A B"]) -> Shaped[np.ndarray, "B A"]:
    """Transpose a matrix in memory, a few rows at a time: ten times as fast as numpy's copy of `x.T`."""
    out = np.empty(x.shape[::-1], x.dtype)
    source, target = x, out
    if x.dtype.itemsize < 4:  # numpy copies its own dtypes faster than those of ml_dtypes
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        source, target = x.view(unsigned), out.view(unsigned)
    for row in range(0, len(x), TRANSPOSE_ROWS):
        target[:, row : row + TRANSPOSE_ROWS] = source[row : row + TRANSPOSE_ROWS].T
    return out


def row_blocks(rows: int) -> Iterator[slice]:
    """Yield ranges of the rows of one FP8 block each."""
    for row in range(0, rows, fp8_blocks.BLOCK):
        yield slice(row, min(row + fp8_blocks.BLOCK, rows))
