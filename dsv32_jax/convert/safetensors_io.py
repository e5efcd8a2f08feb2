"""Read safetensors files by byte ranges, checking their headers, and write them tensor after tensor.

Differs from the safetensors package: nothing is mapped into memory, so memory stays bounded and remote files work.
Source: https://github.com/huggingface/safetensors#format.
"""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from dsv32_jax.convert import storage
from dsv32_jax.convert.storage import Written

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the safetensors package refuses longer ones too


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Attributes:
        file: The file.
        name: The tensor.
        dtype: Safetensors' name of it.
        shape: Its dimensions.
        offset: First byte, counted from the file's beginning.
    """

    file: epath.Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry along the first axis."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def read_header(path: epath.Path) -> dict[str, Entry]:
    """Read a file's list of tensors and check that the file holds them.

    Args:
        path: The file.

    Returns:
        Tensors by name.

    Raises:
        ValueError: If the header cannot be read, a tensor is of a dtype that is not read here, its bytes do not fit
            its shape, tensors overlap or leave gaps, or the file is shorter or longer than they need.
    """
    size = path.stat().length
    header, begin = _parse(path, size)
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, raw, begin) for name, raw in header.items()}
    at = begin
    for e in sorted(entries.values(), key=lambda e: (e.offset, e.nbytes)):
        if e.offset != at:
            raise ValueError(
                f"{path}: {e.name} begins at byte {e.offset - begin} of the data instead of {at - begin}"
            )
        at += e.nbytes
        if at > size:
            raise ValueError(
                f"{path} is truncated: {e.name} ends at byte {at}, the file has {size}"
            )
    if at != size:
        raise ValueError(f"{path} has {size - at} bytes behind its last tensor")
    return entries


def _parse(path: epath.Path, size: int) -> tuple[dict[str, Any], int]:
    """Return the header and where the data begins."""
    with path.open("rb") as file:
        begin = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
        if begin > min(LENGTH_BYTES + MAX_HEADER_BYTES, size):
            raise ValueError(
                f"{path} is not a readable safetensors file: {size} bytes cannot hold its header"
            )
        text = file.read(begin - LENGTH_BYTES)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a readable safetensors file: its header is no object")
    return header, begin


def _entry(path: epath.Path, name: str, raw: Any, begin: int) -> Entry:
    """Check one tensor's description."""
    try:
        dtype, shape = raw["dtype"], tuple(raw["shape"])
        start, end = raw["data_offsets"]
        whole = isinstance(dtype, str)
        whole &= all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"{path}: the header's entry of {name} is malformed")
    if dtype not in DTYPES:
        raise ValueError(f"{path}: {name} is {dtype}; only {', '.join(DTYPES)} can be read")
    entry = Entry(path, name, dtype, shape, begin + start)
    if end - start != entry.nbytes:
        raise ValueError(
            f"{path}: {name} has {end - start} bytes, its shape {list(shape)} in {dtype} needs {entry.nbytes}"
        )
    return entry


def read_rows(entry: Entry, first: int, count: int) -> np.ndarray:
    """Read a range along a tensor's first axis.

    Args:
        entry: The tensor, of one axis or more.
        first: The first row.
        count: How many.

    Returns:
        Array of the tensor's dtype, [count, ...].

    Raises:
        ValueError: If the file has become shorter.
    """
    row = entry.row_bytes
    data = np.empty(count * row, np.uint8)
    view, got = data.data, 0
    with entry.file.open("rb") as file:
        file.seek(entry.offset + first * row)
        while got < data.size:
            n: int = file.readinto(view[got:])
            if not n:
                raise ValueError(f"{entry.file} is truncated: it ends inside {entry.name}")
            got += n
    return data.view(DTYPES[entry.dtype]).reshape((count, *entry.shape[1:]))


def read(entry: Entry) -> np.ndarray:
    """Read a whole tensor.

    Args:
        entry: The tensor, of one axis or more.

    Returns:
        The array.
    """
    return read_rows(entry, 0, entry.shape[0])


def header_bytes(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """Make the beginning of a file whose tensors follow in the order given.

    Args:
        tensors: Safetensors' dtype and the shape by name.

    Returns:
        Length and header, padded with spaces to a multiple of 8 bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # as transformers asks for
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def write_file(
    path: epath.Path,
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    content: Iterable[np.ndarray],
) -> Written:
    """Write a file piece by piece; it takes its name when it is complete.

    Args:
        path: The file; its folder must exist.
        tensors: Safetensors' dtype and the shape by name, in the order of the content.
        content: Arrays that, one after the other, are the tensors' bytes.

    Returns:
        Size and checksum.

    Raises:
        ValueError: If the content is shorter or longer than the header says.
        OSError: If the storage refuses.
    """
    begin = header_bytes(tensors)
    size, crc = len(begin), zlib.crc32(begin)
    want = size + sum(math.prod(s) * DTYPES[d].itemsize for d, s in tensors.values())
    with storage.Replacing(path) as file:
        file.write(begin)
        for data in _byte_views(content):
            file.write(data)
            size += data.nbytes
            crc = zlib.crc32(data, crc)
        if size != want:
            raise ValueError(f"{path}: {size} bytes were written instead of {want}")
    return Written(size, crc)


def _byte_views(content: Iterable[np.ndarray]) -> Iterator[memoryview]:
    for array in content:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
