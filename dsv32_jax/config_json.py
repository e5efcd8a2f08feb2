"""Read a config back from the JSON that a run or a converter wrote."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union


def config_from_json[C](cls: type[C], value: Mapping[str, Any]) -> C:
    """Build a dataclass, and those inside it, from a JSON object with exactly its fields.

    Args:
        cls: The dataclass; its fields are scalars, literals, paths, tuples, further dataclasses, or one of these or
            None.
        value: Parsed JSON: objects for dataclasses, arrays for tuples; a float may be a whole number or the name of a
            non-finite one, such as "inf".

    Returns:
        The config.

    Raises:
        ValueError: If a field is unknown, missing or of another type, or breaks a rule of the config's own; the
            message names it.
    """
    return _group(cls, value, cls.__name__)


def _group[C](cls: type[C], value: Any, path: str) -> C:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}={value!r} must be an object")
    assert dataclasses.is_dataclass(cls), f"{cls} must be a dataclass"
    names = [field.name for field in dataclasses.fields(cls)]
    for name in value:
        if name not in names:
            raise ValueError(f"{path} has no field {name!r}; it has {', '.join(names)}")
    for name in names:
        if name not in value:
            raise ValueError(f"{path} lacks the field {name!r}")
    kinds = typing.get_type_hints(cls)
    fields = {name: _value(kinds[name], value[name], f"{path}.{name}") for name in names}
    try:
        return cls(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _value(kind: Any, value: Any, path: str) -> Any:
    """Check a value against its annotation; turn it into what the field holds."""
    origin, arms = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _group(typing.cast(type, kind), value, path)
    if origin in (Union, types.UnionType):
        return _one_of(arms, value, path)
    if origin is Literal:
        # JSON's true equals 1 in Python, so the types must agree too.
        if not any(value == arm and type(value) is type(arm) for arm in arms):
            raise ValueError(f"{path}={value!r} must be one of {', '.join(map(repr, arms))}")
        return value
    if origin is tuple:
        return _tuple(arms, value, path)
    if kind is float:
        return _float(value, path)
    accepted = str if kind is Path else kind
    if type(value) is not accepted:
        raise ValueError(f"{path}={value!r} must be of type {accepted.__name__}")
    return Path(value) if kind is Path else value


def _one_of(arms: Sequence[Any], value: Any, path: str) -> Any:
    if value is None and types.NoneType in arms:
        return None
    reasons = []
    for arm in arms:
        if arm is not types.NoneType:
            try:
                return _value(arm, value, path)
            except ValueError as error:
                reasons.append(str(error))
    raise ValueError("; or ".join(reasons))


def _tuple(arms: Sequence[Any], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{path}={value!r} must be an array")
    kinds = [arms[0]] * len(value) if arms[1:] == (Ellipsis,) else list(arms)
    if len(kinds) != len(value):
        raise ValueError(f"{path}={value!r} must have {len(kinds)} entries")
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_value(kind, item, f"{path}[{i}]") for i, (kind, item) in pairs)


def _float(value: Any, path: str) -> float:
    if value in ("inf", "-inf", "nan") or type(value) in (int, float):
        return float(value)
    raise ValueError(f"{path}={value!r} must be a number")
