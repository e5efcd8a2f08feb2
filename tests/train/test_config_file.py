import re
import sys

import pytest

from train import config_file

GOOD = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Run:
    steps: int = 3

def get_config():
    return Run()
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Put a configs package of two files in place of the installed one."""
    folder = tmp_path / "configs"
    (folder / "rl").mkdir(parents=True)
    for name in ("__init__.py", "rl/__init__.py"):
        (folder / name).write_text("")
    for name in ("sparse.py", "rl/grpo.py"):
        (folder / name).write_text(GOOD)
    installed = {name: sys.modules.pop(name) for name in configs_modules()}
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in configs_modules():
        del sys.modules[name]
    sys.modules.update(installed)


def configs_modules():
    return [name for name in sys.modules if name.split(".")[0] == "configs"]


def write(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return str(path)


def test_a_path_is_loaded(tmp_path):
    assert config_file.load_config(write(tmp_path, GOOD)).steps == 3


@pytest.mark.parametrize("name", ["sparse", "sparse.py", "rl/grpo", "rl/grpo.py"])
def test_a_name_is_found_in_the_package_with_or_without_its_ending(package, name):
    assert config_file.load_config(name).steps == 3


def test_the_packages_files_are_listed_without_the_private_ones(package):
    assert config_file.config_names() == ["rl/grpo", "sparse"]


def test_every_config_of_the_installed_package_loads():
    for name in config_file.config_names():
        assert config_file.load_config(name) is not None


def test_an_unknown_name_lists_those_that_exist_nearest_first(package):
    with pytest.raises(FileNotFoundError, match=r"no config sparce: .*are sparse, rl/grpo"):
        config_file.load_config("sparce")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "must define get_config()"),
        ("def get_config():\n    return {}\n", "get_config() returned a dict; it must return"),
        (
            "def get_config():\n    raise ValueError('dim=3 must be even')\n",
            "mine.py line 2: get_config() raised ValueError: dim=3 must be even",
        ),
        ("import nothing_of_this_name\n", "mine.py line 1: importing it raised ModuleNotFound"),
        ("x = 1\ndef get_config(:\n", "mine.py line 2: importing it raised SyntaxError"),
        ("x = undefined\n", "mine.py line 1: importing it raised NameError"),
    ],
)
def test_a_broken_config_is_one_line_with_the_place(tmp_path, text, message):
    path = write(tmp_path, text)

    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        config_file.load_config(path)

    assert "\n" not in str(caught.value)
