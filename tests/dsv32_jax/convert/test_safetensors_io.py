import json

import ml_dtypes
import numpy as np
import pytest
from etils import epath
from safetensors import safe_open
from safetensors.numpy import save_file

from dsv32_jax.convert import safetensors_io


def arrays():
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(7, 5)).astype(np.float32),
        "b": rng.normal(size=(3,)).astype(ml_dtypes.bfloat16),
        "c": rng.normal(size=(4, 2, 3)).astype(ml_dtypes.float8_e4m3fn),
    }


@pytest.fixture
def path(tmp_path):
    path = epath.Path(tmp_path / "x.safetensors")
    save_file(arrays(), path)
    return path


def edit(path, change):
    content = path.read_bytes()
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + n :])


def test_what_the_safetensors_package_wrote_is_read(path):
    entries = safetensors_io.read_header(path)

    assert {name: entry.shape for name, entry in entries.items()} == {
        name: array.shape for name, array in arrays().items()
    }
    for name, array in arrays().items():
        got = safetensors_io.read(entries[name])
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


def test_rows_are_read_alone(path):
    entries = safetensors_io.read_header(path)

    np.testing.assert_array_equal(safetensors_io.read_rows(entries["a"], 2, 3), arrays()["a"][2:5])
    np.testing.assert_array_equal(safetensors_io.read_rows(entries["c"], 1, 2), arrays()["c"][1:3])


def test_what_is_written_the_safetensors_package_reads(tmp_path):
    path = epath.Path(tmp_path / "y.safetensors")
    names = {"a": "F32", "b": "BF16", "c": "F8_E4M3"}
    tensors = {name: (names[name], array.shape) for name, array in arrays().items()}
    parts = [arrays()["a"][:4], arrays()["a"][4:], arrays()["b"], arrays()["c"]]

    written = safetensors_io.write_file(path, tensors, parts)

    assert written.bytes == path.stat().length
    with safe_open(path, framework="flax") as file:
        assert file.metadata() == {"format": "pt"}
        for name in ("a", "b"):  # for FP8 it has no numpy dtype
            np.testing.assert_array_equal(file.get_tensor(name), arrays()[name])
        assert file.get_slice("c").get_dtype() == "F8_E4M3"
    assert path.read_bytes().endswith(arrays()["c"].tobytes())
    assert safetensors_io.read_header(path)["a"].offset % 8 == 0


@pytest.mark.parametrize("rows", [6, 8])
def test_a_file_of_another_length_than_its_header_says_is_not_left_behind(tmp_path, rows):
    path = epath.Path(tmp_path / "y.safetensors")

    with pytest.raises(ValueError, match=r"bytes were written instead of"):
        safetensors_io.write_file(path, {"a": ("F32", (7, 5))}, [np.zeros((rows, 5), np.float32)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["a"].update(dtype="F64"), "a is F64; only F32, BF16, F8_E4M3 can be read"),
        (lambda h: h["a"].update(shape=[7, 6]), r"a has 140 bytes, its shape \[7, 6\] in F32 ne"),
        (lambda h: h["a"].pop("shape"), "entry of a is malformed"),
        (lambda h: h["a"].update(shape=[-7, -5]), "entry of a is malformed"),
        (lambda h: h["a"].update(dtype=["F32"]), "entry of a is malformed"),
        (lambda h: h["a"].update(dtype={}), "entry of a is malformed"),
        (lambda h: h.update(a=3), "entry of a is malformed"),
        (lambda h: h.pop("b"), r"(a|c) begins at byte|bytes behind its last tensor"),
    ],
)
def test_a_wrong_header_is_named(path, change, message):
    edit(path, change)

    with pytest.raises(ValueError, match=message) as caught:
        safetensors_io.read_header(path)
    assert str(path) in str(caught.value)


def test_a_cut_file_names_the_first_tensor_that_it_lacks(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    last = max(safetensors_io_offsets(content), key=lambda pair: pair[1])[0]

    with pytest.raises(ValueError, match=rf"is truncated: {last} ends at byte"):
        safetensors_io.read_header(path)


def safetensors_io_offsets(content):
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n])
    return [(name, entry["data_offsets"][1]) for name, entry in header.items()]


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 4,
        (1 << 60).to_bytes(8, "little"),
        b"\x02" + b"\0" * 7 + b"{]",
        len(NESTED).to_bytes(8, "little") + NESTED,
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path, content):
    path = epath.Path(tmp_path / "z.safetensors")
    path.write_bytes(content)

    with pytest.raises(ValueError, match=r"z\.safetensors is not a readable safetensors file"):
        safetensors_io.read_header(path)


def test_a_file_with_more_than_its_tensors_is_refused(path):
    path.write_bytes(path.read_bytes() + b"more")

    with pytest.raises(ValueError, match="has 4 bytes behind its last tensor"):
        safetensors_io.read_header(path)


def test_a_file_that_shrinks_while_it_is_read_is_named(path):
    entry = safetensors_io.read_header(path)["a"]
    path.write_bytes(path.read_bytes()[: entry.offset + 10])

    with pytest.raises(ValueError, match="is truncated: it ends inside a"):
        safetensors_io.read(entry)
