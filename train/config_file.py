"""Finding a run's config: a Python file with a `get_config()` that returns a frozen dataclass."""

import dataclasses
import importlib
import importlib.util
import traceback
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from dsv32_jax.convert import storage
from train import overrides

# What a person's own config file can raise; anything outside of this is not a mistake in a config.
CONFIG_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def load_config(name_or_path: str) -> Any:
    """Load the config that `--config` names.

    An existing file is taken as a path; anything else is looked up in the installed package
    `configs`, with or without `.py`.

    Args:
      name_or_path: `sparse`, `sparse.py`, or a path such as `runs/mine.py`.

    Returns:
      What the file's `get_config()` returned: a dataclass instance.

    Raises:
      FileNotFoundError: no such file and no such name; the message lists those that exist.
      ValueError: the file has no `get_config()`, it raised, or it returned something else.
    """
    path, module_name = _find(name_or_path)
    module = _guarded(path, "importing it", lambda: _import(path, module_name))
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ValueError(f"{path} must define get_config(), which returns the run's config")
    cfg = _guarded(path, "get_config()", get_config)
    if not dataclasses.is_dataclass(cfg) or isinstance(cfg, type):
        raise ValueError(
            f"{path}: get_config() returned a {type(cfg).__name__}; it must return a dataclass"
        )
    return cfg


def config_names() -> list[str]:
    """List the names of the configs in the installed package.

    Returns:
      Names such as `sparse`, or `rl/small` in a subfolder, sorted.
    """
    folder = _package_folder()
    files = folder.rglob("[!_]*.py")
    return sorted(file.relative_to(folder).with_suffix("").as_posix() for file in files)


def _package_folder() -> Path:
    return Path(str(resources.files("configs")))


def _find(name_or_path: str) -> tuple[Path, str | None]:
    """Return the config's file and, where it is in the package, its module's name."""
    if storage.is_remote(name_or_path):
        raise FileNotFoundError(
            f"config {name_or_path}: a config is Python of this machine; copy it here first"
        )
    given = Path(name_or_path)
    if given.is_file():
        return given, None
    name = str(given).removesuffix(".py")
    names = config_names()
    if name in names:
        return _package_folder() / f"{name}.py", f"configs.{name.replace('/', '.')}"
    close = overrides.nearest(name, names)
    others = [*close, *(other for other in names if other not in close)]
    listed = f"the names are {', '.join(others)}" if others else "there are no named ones"
    raise FileNotFoundError(f"no config {name_or_path}: no such file, and {listed}")


def _import(path: Path, module_name: str | None) -> ModuleType:
    if module_name is not None:
        return importlib.import_module(module_name)
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError("its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _guarded[R](path: Path, what: str, call: Callable[[], R]) -> R:
    """Run a piece of the config file; turn what it raises into one line with the place."""
    try:
        return call()
    except CONFIG_ERRORS as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == path.absolute()]
        lines += [frame.lineno for frame in frames if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename in (str(path), str(path.absolute())):
            lines.append(error.lineno)
        place = f"{path} line {lines[-1]}" if lines else str(path)
        raise ValueError(f"{place}: {what} raised {type(error).__name__}: {error}") from error
