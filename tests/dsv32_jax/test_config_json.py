import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from dsv32_jax import config
from dsv32_jax.config_json import config_from_json
from train import overrides


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5

    def __post_init__(self):
        if self.rate < 0:
            raise ValueError(f"rate={self.rate} must not be negative")


@dataclass(frozen=True)
class Outer:
    count: int = 3
    flag: bool = True
    name: str = "x"
    mode: Literal["fast", 1] = "fast"
    folder: Path | None = None
    inner: Inner = Inner()
    other: Inner | None = None
    sizes: tuple[int, ...] = (1, 2)
    pair: tuple[int, float] = (1, 2.0)
    groups: tuple[Inner, ...] = (Inner(),)


def as_json(cfg):
    return json.loads(json.dumps(overrides.to_json_dict(cfg)))


@pytest.mark.parametrize(
    "cfg",
    [
        Outer(),
        Outer(folder=Path("a/b"), other=Inner(1.0), sizes=(), mode=1),
        Outer(inner=Inner(math.inf), groups=(Inner(1.0), Inner(2.0))),
        *(make() for make in config.PRESETS.values()),
    ],
)
def test_what_was_written_is_read_back_equal(cfg):
    assert config_from_json(type(cfg), as_json(cfg)) == cfg


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cuont": 3}, "Outer has no field 'cuont'; it has count, flag"),
        ({"inner": {}}, "Outer.inner lacks the field 'rate'"),
        ({"inner": {"rate": 1, "x": 2}}, "Outer.inner has no field 'x'; it has rate"),
        ({"inner": None}, "Outer.inner=None must be an object"),
        ({"inner": {"rate": -1}}, "Outer.inner: rate=-1.0 must not be negative"),
        ({"inner": {"rate": "much"}}, "Outer.inner.rate='much' must be a number"),
        ({"inner": {"rate": True}}, "Outer.inner.rate=True must be a number"),
        ({"count": 3.0}, "Outer.count=3.0 must be of type int"),
        ({"count": True}, "Outer.count=True must be of type int"),
        ({"flag": 1}, "Outer.flag=1 must be of type bool"),
        ({"name": None}, "Outer.name=None must be of type str"),
        ({"mode": "slow"}, "Outer.mode='slow' must be one of 'fast', 1"),
        ({"mode": True}, "Outer.mode=True must be one of"),
        ({"folder": 3}, "Outer.folder=3 must be of type str"),
        ({"other": {"rate": "x"}}, "Outer.other.rate='x' must be a number"),
        ({"sizes": [1, "2"]}, "Outer.sizes[1]='2' must be of type int"),
        ({"sizes": "12"}, "Outer.sizes='12' must be an array"),
        ({"pair": [1]}, "Outer.pair=[1] must have 2 entries"),
        ({"groups": [{}]}, "Outer.groups[0] lacks the field 'rate'"),
    ],
)
def test_an_error_names_the_field(change, message):
    with pytest.raises(ValueError, match="Outer") as caught:
        config_from_json(Outer, as_json(Outer()) | change)

    assert str(caught.value).startswith(message)


def test_a_missing_field_is_named_although_it_has_a_default():
    value = as_json(Outer())
    del value["count"]

    with pytest.raises(ValueError, match="Outer lacks the field 'count'"):
        config_from_json(Outer, value)
