"""Arrays in the form that Orbax reads: written chunk by chunk, read slice by slice, never whole.

What is written is a tree of zarr version 2 arrays without OCDBT and without compression, one folder an array, so that a
chunk's file is the chunk's bytes and nothing else. What is read may be any tree that Orbax wrote.
Source: orbax-checkpoint 0.12.8, `PyTreeCheckpointHandler(use_ocdbt=False)`, whose files these are like.
"""

import functools
import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts
from etils import epath
from jaxtyping import Shaped

from dsv32_jax.convert import storage

TREE_METADATA = "_METADATA"
DICT_KEY = 2  # Orbax's KeyType.DICT
ZARR_DTYPES = {
    np.dtype(np.float32): "<f4",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
    np.dtype(ml_dtypes.float8_e4m3fn): "float8_e4m3fn",
}
CACHE_CHUNKS = 2  # decoded chunks that stay in memory while their slices are read
MIN_CACHE_BYTES = 64 << 20

Keys = tuple[str, ...]


def array_folder(keys: Keys) -> str:
    """Return the folder of an array in its tree."""
    return ".".join(keys)


def chunk_file(keys: Keys, index: Sequence[int]) -> str:
    """Return the file of a chunk, relative to the tree's folder.

    Args:
        keys: The array's path in the tree.
        index: The chunk's position in the grid of chunks.

    Returns:
        Relative name.
    """
    return f"{array_folder(keys)}/{'.'.join(map(str, index))}"


def zarr_metadata(shape: Sequence[int], chunks: Sequence[int], dtype: np.dtype) -> bytes:
    """Return the content of an array's `.zarray`.

    Args:
        shape: Of the array.
        chunks: Of one chunk; must divide the shape.
        dtype: float32, bfloat16 or float8_e4m3fn.

    Returns:
        JSON.
    """
    assert all(n % c == 0 for n, c in zip(shape, chunks, strict=True)), "chunks must be whole"
    return json.dumps(
        {
            "chunks": list(chunks),
            "compressor": None,
            "dimension_separator": ".",
            "dtype": ZARR_DTYPES[dtype],
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(shape),
            "zarr_format": 2,
        }
    ).encode()


def tree_metadata(shapes: Mapping[Keys, Sequence[int]]) -> bytes:
    """Return the content of a tree's `_METADATA`.

    Args:
        shapes: Of each array by its path.

    Returns:
        JSON.
    """
    tree = {
        str(keys): {
            "key_metadata": [{"key": key, "key_type": DICT_KEY} for key in keys],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": list(shape),
            },
        }
        for keys, shape in shapes.items()
    }
    return json.dumps(
        {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    ).encode()


class ArrayTree:
    """The arrays of one saved tree, read by slices; may be used from several threads."""

    def __init__(self, folder: epath.Path) -> None:
        """Read the list of arrays.

        Args:
            folder: What Orbax calls an item, such as `<run>/checkpoints/<step>/state`.

        Raises:
            ValueError: If its metadata cannot be read.
        """
        self.folder = folder
        try:
            raw = json.loads((folder / TREE_METADATA).read_text())
            self.names: set[Keys] = {
                tuple(str(part["key"]) for part in entry["key_metadata"])
                for entry in raw["tree_metadata"].values()
            }
            self._ocdbt, self._zarr3 = raw["use_ocdbt"], raw["use_zarr3"]
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(f"{folder / TREE_METADATA} cannot be read: {error}") from error
        self._lock = threading.Lock()
        self._context: ts.Context | None = None
        self._largest = 0
        self._opened: dict[Keys, Any] = {}

    def children(self, prefix: Keys) -> set[str]:
        """Return the names of the arrays right below a path."""
        depth = len(prefix)
        return {
            keys[depth] for keys in self.names if len(keys) == depth + 1 and keys[:depth] == prefix
        }

    def shape(self, keys: Keys) -> tuple[int, ...]:
        """Return an array's shape."""
        raw = self._raw(keys)
        return tuple(raw["shape"]) if raw is not None else tuple(self._open(keys).shape)

    def dtype(self, keys: Keys) -> np.dtype:
        """Return an array's dtype."""
        raw = self._raw(keys)
        if raw is not None:
            return next(d for d, name in ZARR_DTYPES.items() if name == raw["dtype"])
        return np.dtype(self._open(keys).dtype.numpy_dtype)

    def read(self, keys: Keys, index: Sequence[slice]) -> Shaped[np.ndarray, "..."]:
        """Read a slice.

        Args:
            keys: The array's path in the tree.
            index: A slice without a step along each axis.

        Returns:
            The slice, with all axes.

        Raises:
            KeyError: If there is no such array.
        """
        if keys not in self.names:
            raise KeyError(array_folder(keys))
        raw = self._raw(keys)
        if raw is not None:
            bounds = [s.indices(n) for s, n in zip(index, raw["shape"], strict=True)]
            grid = [start // c for (start, _, _), c in zip(bounds, raw["chunks"], strict=True)]
            whole = all(
                start == g * c and stop == start + c
                for (start, stop, _), g, c in zip(bounds, grid, raw["chunks"], strict=True)
            )
            if whole:  # ten times as fast as TensorStore, which copies FP8 value by value
                return self._read_chunk(keys, grid, raw)
        return np.asarray(self._open(keys)[tuple(index)].read().result())

    def _read_chunk(
        self, keys: Keys, grid: Sequence[int], raw: dict[str, Any]
    ) -> Shaped[np.ndarray, "..."]:
        path = self.folder / chunk_file(keys, grid)
        dtype = self.dtype(keys)
        data = np.empty(math.prod(raw["chunks"]) * dtype.itemsize, np.uint8)
        got = 0
        with path.open("rb") as file:
            while got < data.size:
                n: int = file.readinto(data.data[got:])
                if not n:
                    raise ValueError(f"{path} is truncated at byte {got} of {data.size}")
                got += n
        return data.view(dtype).reshape(raw["chunks"])

    @functools.cache  # noqa: B019  (a tree lives as long as the command)
    def _raw(self, keys: Keys) -> dict[str, Any] | None:
        """Return an uncompressed zarr array's own metadata, None for an array of another form."""
        path = self.folder / array_folder(keys) / ".zarray"
        if self._ocdbt or self._zarr3 or not path.is_file():
            return None
        raw = json.loads(path.read_text())
        plain = raw.get("compressor") is None and not raw.get("filters") and raw["order"] == "C"
        return raw if plain and raw["dtype"] in ZARR_DTYPES.values() else None

    def _open(self, keys: Keys) -> Any:
        """Open an array by TensorStore, its decoded chunks kept for the slices that follow."""
        with self._lock:
            if keys not in self._opened:
                first = ts.open(self._spec(keys), open=True, read=True).result()
                entries: Any = first.chunk_layout.read_chunk.shape
                chunk = math.prod(entries) * first.dtype.numpy_dtype.itemsize
                if self._context is None or chunk > self._largest:
                    self._largest = max(self._largest, chunk)
                    limit = max(MIN_CACHE_BYTES, CACHE_CHUNKS * self._largest)
                    self._context = ts.Context({"cache_pool": {"total_bytes_limit": limit}})
                self._opened[keys] = ts.open(
                    self._spec(keys), open=True, read=True, context=self._context
                ).result()
            return self._opened[keys]

    def _spec(self, keys: Keys) -> dict[str, Any]:
        folder = storage.kvstore(self.folder)
        if self._ocdbt:
            store = {"driver": "ocdbt", "base": folder, "path": f"{array_folder(keys)}/"}
        else:
            store = folder | {"path": f"{folder['path']}{array_folder(keys)}/"}
        return {"driver": "zarr3" if self._zarr3 else "zarr", "kvstore": store}
