import pathlib

import pytest

from train.data import files


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.txt", "text"),
        ("a.md.gz", "text"),
        ("A.PY", "text"),
        ("a.jsonl", "jsonl"),
        ("c4.json.gz", "jsonl"),
        ("a.jsonl.zst", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.array_record", "tokens"),
        ("package.json", None),
        ("LICENSE", None),
    ],
)
def test_the_suffix_tells_the_format(name, form):
    assert files.file_format(pathlib.Path(name)) == form


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a/deep/c.md", "skipped.bin", ".git/d.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    return tmp_path


def test_a_folder_gives_its_known_files_sorted_without_hidden_ones(folder):
    assert files.list_files(str(folder)) == [folder / "a/deep/c.md", folder / "b.txt"]


def test_a_hidden_folder_named_directly_is_read(folder):
    assert files.list_files(str(folder / ".git")) == [folder / ".git/d.txt"]


def test_a_glob_gives_the_files_it_matches(folder):
    assert files.list_files(f"{folder}/**/*.md") == [folder / "a/deep/c.md"]


def test_a_file_whose_name_looks_like_a_glob_is_read_as_that_file(tmp_path):
    path = tmp_path / "part[1].txt"
    path.write_text("text")
    assert files.list_files(str(path)) == [path]


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        files.list_files(str(tmp_path / "nowhere.txt"))


def test_a_glob_without_a_match_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="the glob matches no file"):
        files.list_files(f"{tmp_path}/*.txt")


def test_an_unknown_suffix_is_an_error_that_lists_the_known(folder):
    with pytest.raises(ValueError, match=r"skipped\.bin: unknown suffix; known are \.txt"):
        files.list_files(str(folder / "skipped.bin"))


def test_a_folder_without_a_known_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="the folder holds no file with one of"):
        files.list_files(str(tmp_path))
