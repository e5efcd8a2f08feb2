import errno
import io
import zlib

import fsspec
import numpy as np
import pytest
from etils import epath
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem

from dsv32_jax.convert import safetensors_io, storage


@pytest.mark.parametrize(
    ("path", "store"),
    [
        ("/data/run", {"driver": "file", "path": "/data/run/"}),
        ("gs://bucket/a/b", {"driver": "gcs", "bucket": "bucket", "path": "a/b/"}),
        ("gs://bucket", {"driver": "gcs", "bucket": "bucket", "path": ""}),
        ("s3://bucket/a/", {"driver": "s3", "bucket": "bucket", "path": "a/"}),
    ],
)
def test_a_folder_has_its_store_in_tensorstore(path, store):
    assert storage.kvstore(epath.Path(path)) == store


def test_a_relative_path_is_made_absolute_and_a_url_left_alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage, "is_installed", lambda package: True)

    assert str(storage.as_path("x/y")) == f"{tmp_path}/x/y"
    assert str(storage.as_path("gs://bucket/x")) == "gs://bucket/x"
    assert storage.is_remote("gs://bucket/x")
    assert not storage.is_remote(tmp_path)


@pytest.fixture
def bucket(monkeypatch):
    """Let gs:// be a file system in memory, through the same calls that gcsfs gets."""

    class Bucket(MemoryFileSystem):
        protocol = "gs"
        store: dict = {}  # noqa: RUF012
        pseudo_dirs = [""]  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(str(path).removeprefix("gs://"))

    Bucket.store.clear()
    assert isinstance(Bucket(), fsspec.AbstractFileSystem)
    monkeypatch.setattr(storage, "is_installed", lambda package: True)
    monkeypatch.setattr(
        backend._FileSystemSpecBackend, "_get_filesystem", lambda self, name: Bucket()
    )
    return epath.Path("gs://bucket")


def test_arrays_go_to_a_bucket_and_come_back(bucket):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)

    written = storage.write_array(bucket / "a.bin", array)

    assert written == (48, zlib.crc32(array.tobytes()))
    assert storage.measure(bucket / "a.bin") == written
    assert storage.find_damage(bucket, "a.bin", written) is None
    assert "missing" in storage.find_damage(bucket, "b.bin", written)


def test_safetensors_are_written_to_and_read_from_a_bucket(bucket):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = bucket / "x.safetensors"

    safetensors_io.write_file(path, {"a": ("F32", (3, 4))}, [array[:1], array[1:]])

    entry = safetensors_io.read_header(path)["a"]
    np.testing.assert_array_equal(safetensors_io.read_rows(entry, 1, 2), array[1:])
    assert storage.file_names(bucket) == ["x.safetensors"]


def test_a_file_is_copied_with_the_folders_above_it(tmp_path):
    source, target = epath.Path(tmp_path / "a"), epath.Path(tmp_path / "x" / "y" / "b")
    source.write_bytes(b"content" * 1000)

    written = storage.copy(source, target)

    assert target.read_bytes() == source.read_bytes()
    assert written == (7000, zlib.crc32(b"content" * 1000))


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = epath.Path(tmp_path / "a")
    storage.write(path, b"old")

    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.Path, "open", lambda self, mode: Full())
    with pytest.raises(OSError, match="No space"):
        storage.write(path, b"new")
    monkeypatch.undo()

    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_damage_is_told_by_presence_size_and_content(tmp_path):
    folder = epath.Path(tmp_path)
    want = storage.write_array(folder / "a", np.arange(4, dtype=np.float32))

    assert storage.find_damage(folder, "a", want) is None
    (folder / "a").write_bytes(b"x" * 16)
    assert "its checksum differs" in storage.find_damage(folder, "a", want)
    (folder / "a").write_bytes(b"x" * 15)
    assert "has 15 bytes instead of 16" in storage.find_damage(folder, "a", want)
    (folder / "a").unlink()
    assert "is missing" in storage.find_damage(folder, "a", want)


def test_hidden_files_are_not_listed(tmp_path):
    for name in (".git/config", ".hidden", "a", "sub/b", "sub/.c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    assert storage.file_names(epath.Path(tmp_path)) == ["a", "sub/b"]


def test_a_conversion_from_a_bucket_into_a_bucket_and_back_is_exact(
    bucket, official_fp8, convert, read_official, tmp_path
):
    folder, _, _ = official_fp8()
    for path in folder.rglob("*"):
        if path.is_file():
            target = bucket / "hf" / path.relative_to(folder).as_posix()
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())

    status, out, err = convert("from-hf", bucket / "hf", bucket / "orbax")
    assert status == 0, err
    assert "gs://bucket/orbax" in out
    assert (bucket / "orbax" / "checkpoints" / "0" / "manifest.json").is_file()
    status, _, err = convert("from-hf", bucket / "hf", bucket / "orbax")
    assert status == 0, err

    status, _, err = convert("to-hf", bucket / "orbax", tmp_path / "back")

    assert status == 0, err
    assert read_official(tmp_path / "back") == read_official(folder)
    assert (tmp_path / "back" / "encoding" / "readme.txt").read_text() == "how to encode"
    status, _, err = convert("to-hf", bucket / "orbax", bucket / "back")
    assert status == 0, err
    for path in (tmp_path / "back").glob("*.safetensors"):
        assert (bucket / "back" / path.name).read_bytes() == path.read_bytes()


def test_what_was_left_half_written_is_removed_and_nothing_else(tmp_path):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    kept = [folder / "x.partial", folder / ".hidden", tmp_path / "x"]
    gone = [folder / ".x.partial", tmp_path / ".y.jsonl.partial"]
    for path in [*kept, *gone]:
        path.write_bytes(b"")
    storage.remove_partials(epath.Path(tmp_path))
    assert [path.exists() for path in [*kept, *gone]] == [True] * 3 + [False] * 2
