import sysconfig

import pytest

from train.data import stdlib


@pytest.fixture(scope="module")
def read():
    return list(stdlib.read_stdlib())


def test_the_corpus_has_megabytes_of_modules_and_topics(read):
    names = {document.name for document in read}
    assert {"stdlib/abc.py", "stdlib/json/decoder.py", "pydoc/for"} <= names
    assert sum(len(document.text) for document in read) > 5_000_000


def test_names_are_unique_and_the_order_repeats(read):
    names = [document.name for document in read]
    assert len(set(names)) == len(names)
    assert list(stdlib.read_stdlib()) == read


def test_tests_tables_and_installed_packages_are_left_out(read):
    for document in read:
        folders = document.name.split("/")[:-1]
        assert stdlib.SKIPPED_FOLDERS.isdisjoint(folders)


def test_a_python_without_sources_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="no standard library as source files"):
        list(stdlib.read_stdlib())


def test_a_module_that_is_not_utf8_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "bad.py").write_bytes(b"# \xff")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"bad\.py: not valid UTF-8 at byte 2"):
        list(stdlib.read_stdlib())


def test_installed_packages_are_read_without_tests_tables_and_odd_encodings(monkeypatch, tmp_path):
    (tmp_path / "good" / "tests").mkdir(parents=True)
    (tmp_path / "good" / "a.py").write_text("a = 1")
    (tmp_path / "good" / "tests" / "b.py").write_text("b = 1")
    (tmp_path / "good" / "latin.py").write_bytes(b"# \xff")
    (tmp_path / "good" / "table.py").write_bytes(b"#" * (stdlib.MAX_MODULE_BYTES + 1))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    assert [(d.name, d.text) for d in stdlib.read_site_packages()] == [
        ("site-packages/good/a.py", "a = 1")
    ]


def test_a_python_without_packages_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="no package is installed there"):
        list(stdlib.read_site_packages())
