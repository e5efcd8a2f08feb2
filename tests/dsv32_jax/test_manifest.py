import json

import pytest

from dsv32_jax import manifest


@pytest.fixture
def folder(tmp_path):
    """Make a folder of two files with its manifest."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "big").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "meta").write_bytes(b"{}")
    manifest.write_manifest(tmp_path, checksums=True, metric=0.25)
    return tmp_path


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_an_untouched_folder_is_whole(folder):
    assert manifest.find_damage(folder, checksums=True) is None
    assert manifest.read_manifest(folder)["metric"] == 0.25


def test_a_flipped_bit_is_named(folder):
    flip_a_bit(folder / "state" / "big")

    assert "state/big does not hold what was written" in manifest.find_damage(
        folder, checksums=True
    )


def test_a_flipped_bit_is_not_seen_by_size_alone(folder):
    flip_a_bit(folder / "state" / "big")

    assert manifest.find_damage(folder, checksums=False) is None


@pytest.mark.parametrize("checksums", [True, False])
def test_a_shortened_file_is_named_with_both_sizes(folder, checksums):
    (folder / "state" / "big").write_bytes(b"x" * 10)

    damage = manifest.find_damage(folder, checksums=checksums)

    assert damage == "state/big has 10 bytes instead of 25600"


def test_a_missing_file_is_named(folder):
    (folder / "meta").unlink()

    assert manifest.find_damage(folder, checksums=False) == "meta is missing"


def test_a_missing_manifest_is_damage(folder):
    (folder / "manifest.json").unlink()

    assert manifest.find_damage(folder, checksums=True) == "manifest.json is missing"


@pytest.mark.parametrize(
    "text", ["{", "[" * 100000, "[]", "{}", '{"files": {"a": {}}}', '{"files": 3}', "\x00"]
)
def test_a_broken_manifest_is_damage(folder, text):
    (folder / "manifest.json").write_text(text)

    assert manifest.find_damage(folder, checksums=True) == "manifest.json is damaged"


def test_the_files_that_orbax_adds_later_are_not_listed(tmp_path):
    (tmp_path / "_CHECKPOINT_METADATA").write_text("before")
    (tmp_path / "a").write_text("a")

    manifest.write_manifest(tmp_path, checksums=True, metric=None)

    assert list(manifest.read_manifest(tmp_path)["files"]) == ["a"]


def test_without_checksums_none_is_recorded_and_none_is_missed(tmp_path):
    (tmp_path / "a").write_text("a")

    manifest.write_manifest(tmp_path, checksums=False, metric=None)

    entries = json.loads((tmp_path / "manifest.json").read_text())["files"]
    assert entries == {"a": {"bytes": 1, "crc32": None}}
    assert manifest.find_damage(tmp_path, checksums=True) is None
