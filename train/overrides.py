"""Typed `key=value` overrides of a nested frozen dataclass, its JSON form, and a difference."""

import dataclasses
import difflib
import enum
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})
NONE_WORDS = frozenset({"none", "null"})


def apply_overrides[C](cfg: C, overrides: Sequence[str]) -> C:
    """Return the config with each `dotted.key=value` applied.

    All overrides of one dataclass are applied together, so that its `__post_init__` sees the values
    that were asked for and never a mixture of some new and some old ones.

    Args:
      cfg: a frozen dataclass, its fields scalars, tuples, or further dataclasses.
      overrides: texts such as `optimizer.lr=3e-4`; the types come from the fields' annotations.

    Returns:
      A new config; cfg itself where there are no overrides.

    Raises:
      ValueError: an override without `=`, an unknown key (names the nearest), a key given twice,
        a value of the wrong type (names what is allowed), or a rule of the config's own (names
        the keys).
    """
    values: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"override {override!r} must be written key=value")
        if key in values:
            raise ValueError(f"{key} is given twice: {values[key]!r} and {text!r}")
        values[key] = text
    paths = list(field_paths(cfg))
    for key in values:
        _check_key(cfg, key, paths)
    return _replace(cfg, values, prefix="")


def field_paths(cfg: Any, prefix: str = "") -> Iterator[str]:
    """List the dotted path of each field that an override can set.

    Args:
      cfg: a dataclass instance.
      prefix: put before each path, with its dot.

    Yields:
      Paths such as `optimizer.lr`, in the order of the fields.
    """
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if _is_group(value):
            yield from field_paths(value, f"{prefix}{field.name}.")
        elif field.init:
            yield f"{prefix}{field.name}"


def to_json_dict(cfg: Any) -> dict[str, Any]:
    """Return a config as the JSON object that goes into `config.json`.

    Dataclasses become objects, tuples lists, paths text, enums their value; a non-finite float
    becomes its name ("inf"), because JSON has no number for it.

    Args:
      cfg: a dataclass instance.

    Returns:
      Nested dicts, lists and scalars.

    Raises:
      ValueError: a field holds something else; the message names the field.
    """
    return {
        field.name: _to_json(getattr(cfg, field.name), field.name)
        for field in dataclasses.fields(cfg)
    }


def config_diff(old_json: Mapping[str, Any], new_json: Mapping[str, Any]) -> list[str]:
    """Say how two configs differ, one line a field.

    Args:
      old_json: the config a run was started with, as `to_json_dict` gave it.
      new_json: the config now.

    Returns:
      Lines such as `optimizer.lr: 0.0003 -> 0.001`, sorted by field; empty where they are equal.
    """
    old, new = dict(_flatten(old_json)), dict(_flatten(new_json))
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key not in new:
            lines.append(f"{key}: {old[key]!r} -> (no such field)")
        elif key not in old:
            lines.append(f"{key}: (no such field) -> {new[key]!r}")
        elif old[key] != new[key]:
            lines.append(f"{key}: {old[key]!r} -> {new[key]!r}")
    return lines


def nearest(word: str, candidates: Sequence[str]) -> list[str]:
    """Return up to three candidates that look like the word, best first.

    A dotted candidate also matches by its last part, so that `lr` finds `optimizer.lr`.

    Args:
      word: what was typed.
      candidates: what exists.

    Returns:
      The similar candidates; empty where none is similar.
    """

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, word, candidate).ratio()
        tails = difflib.SequenceMatcher(
            None, word.rpartition(".")[2], candidate.rpartition(".")[2]
        ).ratio()
        # A shared last part counts for a little less than a shared whole path.
        return max(whole, 0.95 * tails)

    similar = [c for c in candidates if likeness(c) >= 0.6]
    return sorted(similar, key=likeness, reverse=True)[:3]


def _is_group(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _check_key(cfg: Any, key: str, paths: Sequence[str]) -> None:
    """Refuse a key that is no settable field, saying what is nearest."""
    if key in paths:
        return
    node, walked = cfg, ""
    for part in key.split("."):
        if not _is_group(node) or part not in {f.name for f in dataclasses.fields(node)}:
            break
        node, walked = getattr(node, part), f"{walked}.{part}".lstrip(".")
    if walked == key:
        if _is_group(node):
            if _may_be_none(cfg, key):
                return
            inside = ", ".join(f"{key}.{field.name}" for field in dataclasses.fields(node))
            raise ValueError(f"{key} is a group; set one of {inside}")
        raise ValueError(f"{key} is derived, not set")
    if walked and node is None:
        raise ValueError(f"{key} can not be set: {walked} is None in this config")
    close = nearest(key, paths)
    top = ", ".join(dict.fromkeys(path.partition(".")[0] for path in paths))
    hint = f"did you mean {' or '.join(close)}?" if close else f"at the top there are {top}"
    raise ValueError(f"unknown config field {key}; {hint}")


def _may_be_none(cfg: Any, key: str) -> bool:
    """Tell whether a group may be left out, by `key=none`."""
    *parents, name = key.split(".")
    for parent in parents:
        cfg = getattr(cfg, parent)
    return types.NoneType in typing.get_args(typing.get_type_hints(type(cfg))[name])


def _replace(cfg: Any, values: Mapping[str, str], prefix: str) -> Any:
    """Rebuild one dataclass, children first, from the overrides below it."""
    if not values:
        return cfg
    hints = typing.get_type_hints(type(cfg))
    below: dict[str, dict[str, str]] = {}
    changes: dict[str, Any] = {}
    for key, text in values.items():
        name, dot, rest = key.partition(".")
        if dot:
            below.setdefault(name, {})[rest] = text
        else:
            changes[name] = _parse(hints[name], text, f"{prefix}{name}")
    for name, inner in below.items():
        if name in changes:
            raise ValueError(f"{prefix}{name} is set as a whole, so nothing in it can be set")
        changes[name] = _replace(getattr(cfg, name), inner, f"{prefix}{name}.")
    try:
        return dataclasses.replace(cfg, **changes)
    except ValueError as error:
        keys = ", ".join(f"{prefix}{key}={text}" for key, text in values.items())
        raise ValueError(f"{keys}: {error}") from error


def _parse(kind: Any, text: str, key: str) -> Any:
    """Turn text into a value of the annotated type, or raise naming the key and what is allowed."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _parse_union(args, text, key)
    if origin is Literal:
        return _pick({str(choice): choice for choice in args}, text, key)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _pick({str(member.value): member for member in kind}, text, key)
    if kind is bool:
        return _parse_bool(text, key)
    if kind in (int, float):
        return _parse_number(kind, text, key)
    if kind is str:
        return text
    if kind is Path:
        return Path(text)
    if origin is tuple:
        return _parse_tuple(args, text, key)
    if hasattr(kind, "from_text"):
        return kind.from_text(text)
    if dataclasses.is_dataclass(kind):
        raise ValueError(f"{key}={text} must be none, or set the fields in it one by one")
    raise ValueError(f"{key} is of type {kind} and can not be set on the command line")


def _pick(choices: Mapping[str, Any], text: str, key: str) -> Any:
    if text not in choices:
        raise ValueError(f"{key}={text} must be one of {', '.join(choices)}")
    return choices[text]


def _parse_bool(text: str, key: str) -> bool:
    word = text.lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise ValueError(f"{key}={text} must be true or false")
    return word in TRUE_WORDS


def _parse_number(kind: type[int] | type[float], text: str, key: str) -> int | float:
    noun = "a whole number" if kind is int else "a number"
    try:
        number = kind(text)
    except ValueError:
        raise ValueError(f"{key}={text} must be {noun}") from None
    if math.isnan(number):
        raise ValueError(f"{key}={text} must be {noun}")
    return number


def _parse_union(args: Sequence[Any], text: str, key: str) -> Any:
    """Try each arm in order, text last, since any value is a text."""
    arms = [arm for arm in args if arm is not types.NoneType]
    if len(arms) < len(args) and text.lower() in NONE_WORDS:
        return None
    reasons = []
    for arm in sorted(arms, key=lambda arm: arm is str):
        try:
            return _parse(arm, text, key)
        except ValueError as error:
            reasons.append(str(error))
    reason = "; ".join(reasons)
    raise ValueError(f"{reason}, or none" if len(arms) < len(args) else reason)


def _parse_tuple(args: Sequence[Any], text: str, key: str) -> tuple[Any, ...]:
    inner = text.strip().removeprefix("(").removesuffix(")").strip()
    parts = [part.strip() for part in inner.removesuffix(",").split(",")] if inner else []
    if len(args) == 2 and args[1] is Ellipsis:
        kinds = [args[0]] * len(parts)
    else:
        kinds = [] if args == ((),) else list(args)
    if len(kinds) != len(parts):
        raise ValueError(f"{key}={text} must have {len(kinds)} values with commas between them")
    return tuple(_parse(kind, part, key) for kind, part in zip(kinds, parts, strict=True))


def _to_json(value: Any, path: str) -> Any:
    if _is_group(value):
        return {
            field.name: _to_json(getattr(value, field.name), f"{path}.{field.name}")
            for field in dataclasses.fields(value)
        }
    if isinstance(value, enum.Enum):
        return _to_json(value.value, path)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_to_json(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {str(key): _to_json(item, f"{path}.{key}") for key, item in value.items()}
    raise ValueError(f"{path} is of type {type(value).__name__}, which has no form in config.json")


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
