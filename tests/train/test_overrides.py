import dataclasses
import enum
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from train import overrides


class Stage(enum.Enum):
    DENSE = "dense"
    SPARSE = "sparse"


@dataclass(frozen=True, kw_only=True)
class MoE:
    n_experts: int = 4
    n_active: int = 2

    def __post_init__(self):
        if self.n_active > self.n_experts:
            raise ValueError(f"n_active={self.n_active} must be at most n_experts={self.n_experts}")


@dataclass(frozen=True, kw_only=True)
class Model:
    dim: int = 64
    moe: MoE = MoE()
    mtp: MoE | None = None
    windows: tuple[int, ...] = (1, 2)
    rope: tuple[float, str] = (1e4, "yarn")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: float = 1e-3
    clip: float | None = 1.0
    kind: Literal["adamw", "muon"] = "adamw"


@dataclass(frozen=True, kw_only=True)
class Run:
    steps: int = 10
    name: str = "run"
    init_from: str | None = None
    resume: bool = True
    seed_or_name: int | str = 0
    accum: Literal[1, 2, 4] = 1
    stage: Stage = Stage.DENSE
    data: Path = Path("data")
    extra: dict[str, int] = field(default_factory=dict)
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    derived: int = field(default=7, init=False)


def set_one(override: str) -> Any:
    """Apply one override and return the field's new value."""
    value: Any = overrides.apply_overrides(Run(), [override])
    for name in override.partition("=")[0].split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("steps=-1", -1),
        ("optimizer.lr=3e-4", 3e-4),
        ("optimizer.lr=1", 1.0),
        ("optimizer.lr=inf", math.inf),
        ("optimizer.clip=none", None),
        ("optimizer.clip=0.5", 0.5),
        ("optimizer.kind=muon", "muon"),
        ("accum=4", 4),
        ("stage=sparse", Stage.SPARSE),
        ("name=a=b", "a=b"),
        ("name=", ""),
        ("init_from=runs/x", "runs/x"),
        ("init_from=null", None),
        ("seed_or_name=3", 3),
        ("seed_or_name=three", "three"),
        ("data=/tmp/x", Path("/tmp/x")),
        ("model.moe.n_experts=8", 8),
        ("model.windows=3,4,5", (3, 4, 5)),
        ("model.windows=(3,)", (3,)),
        ("model.windows=", ()),
        ("model.windows=()", ()),
        ("model.rope=5e5, plain", (5e5, "plain")),
    ],
)
def test_an_override_has_its_fields_type(override, value):
    changed = set_one(override)

    assert changed == value
    assert type(changed) is type(value)


@pytest.mark.parametrize("word", ["false", "False", "no", "off", "0", "FALSE"])
def test_each_spelling_of_false_is_false(word):
    assert set_one(f"resume={word}") is False


@pytest.mark.parametrize("word", ["true", "True", "yes", "on", "1"])
def test_each_spelling_of_true_is_true(word):
    assert set_one(f"resume={word}") is True


def test_the_original_is_untouched_and_other_fields_stay():
    cfg = Run()

    changed = overrides.apply_overrides(cfg, ["model.moe.n_experts=8", "optimizer.lr=0.1"])

    assert cfg == Run()
    assert changed == dataclasses.replace(
        cfg, model=Model(moe=MoE(n_experts=8)), optimizer=Optimizer(lr=0.1)
    )


def test_fields_that_depend_on_each_other_can_be_set_in_either_order():
    pair = ["model.moe.n_active=6", "model.moe.n_experts=8"]

    changed = overrides.apply_overrides(Run(), pair)

    assert changed.model.moe == MoE(n_experts=8, n_active=6)
    assert changed == overrides.apply_overrides(Run(), pair[::-1])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "unknown config field optimizer.lrr; did you mean optimizer.lr"),
        ("lr=1", "did you mean optimizer.lr"),
        ("model.n_experts=1", "did you mean model.moe.n_experts"),
        ("step=1", "did you mean steps"),
        ("zzzz=1", "at the top there are steps, name"),
        ("steps.x=1", "unknown config field steps.x"),
        ("model=1", "model is a group; set one of model.dim, model.moe"),
        ("model.mtp.n_experts=1", "model.mtp is None in this config"),
        ("derived=1", "derived is derived, not set"),
        ("steps", "'steps' must be written key=value"),
        ("=1", "must be written key=value"),
        ("steps=1.5", "steps=1.5 must be a whole number"),
        ("optimizer.lr=fast", "optimizer.lr=fast must be a number"),
        ("optimizer.lr=nan", "optimizer.lr=nan must be a number"),
        ("optimizer.clip=x", "optimizer.clip=x must be a number, or none"),
        ("optimizer.kind=sgd", "optimizer.kind=sgd must be one of adamw, muon"),
        ("accum=3", "accum=3 must be one of 1, 2, 4"),
        ("stage=warm", "stage=warm must be one of dense, sparse"),
        ("resume=maybe", "resume=maybe must be true or false"),
        ("model.windows=1,x", "model.windows=x must be a whole number"),
        ("model.rope=1", "model.rope=1 must have 2 values"),
        ("extra=1", "can not be set on the command line"),
        ("model.mtp=1", "model.mtp=1 must be none, or set the fields in it"),
    ],
)
def test_a_wrong_override_says_what_would_be_right(override, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        overrides.apply_overrides(Run(), [override])

    assert "\n" not in str(caught.value)


def test_a_key_given_twice_is_refused():
    with pytest.raises(ValueError, match="steps is given twice: '1' and '2'"):
        overrides.apply_overrides(Run(), ["steps=1", "steps=2"])


def test_a_rule_of_the_config_itself_is_reported_with_the_key():
    with pytest.raises(
        ValueError, match=r"model\.moe\.n_active=9: n_active=9 must be at most n_experts=4"
    ):
        overrides.apply_overrides(Run(), ["model.moe.n_active=9"])


def test_the_json_form_is_plain_and_complete():
    form = overrides.to_json_dict(Run(optimizer=Optimizer(lr=math.inf), extra={"a": 1}))

    assert form == {
        "steps": 10,
        "name": "run",
        "init_from": None,
        "resume": True,
        "seed_or_name": 0,
        "accum": 1,
        "stage": "dense",
        "data": "data",
        "extra": {"a": 1},
        "model": {
            "dim": 64,
            "moe": {"n_experts": 4, "n_active": 2},
            "mtp": None,
            "windows": [1, 2],
            "rope": [1e4, "yarn"],
        },
        "optimizer": {"lr": "inf", "clip": 1.0, "kind": "adamw"},
        "derived": 7,
    }


def test_a_field_without_a_json_form_is_named():
    @dataclass(frozen=True)
    class Odd:
        schedule: Any

    with pytest.raises(ValueError, match="schedule is of type set"):
        overrides.to_json_dict(Odd({1}))


def test_a_config_differs_from_itself_in_nothing():
    form = overrides.to_json_dict(Run())

    assert overrides.config_diff(form, form) == []


def test_each_difference_is_one_line_with_both_values():
    old = overrides.to_json_dict(Run())
    new = overrides.to_json_dict(
        overrides.apply_overrides(Run(), ["optimizer.lr=3e-4", "model.windows=5"])
    )
    del old["steps"]
    old["gone"] = {"x": 1}

    assert overrides.config_diff(old, new) == [
        "gone.x: 1 -> (no such field)",
        "model.windows: [1, 2] -> [5]",
        "optimizer.lr: 0.001 -> 0.0003",
        "steps: (no such field) -> 10",
    ]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    path: str

    @classmethod
    def from_text(cls, text: str) -> "Corpus":
        return cls(path=text)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    corpora: tuple[Corpus, ...] = ()
    shadow: MoE | None = MoE()


def test_a_group_that_may_be_none_is_left_out_as_a_whole():
    assert overrides.apply_overrides(Mixture(), ["shadow=none"]).shadow is None
    assert overrides.apply_overrides(Mixture(), ["shadow.n_active=1"]).shadow == MoE(n_active=1)
    with pytest.raises(ValueError, match="shadow=4 must be none, or set the fields"):
        overrides.apply_overrides(Mixture(), ["shadow=4"])
    with pytest.raises(ValueError, match="shadow is set as a whole"):
        overrides.apply_overrides(Mixture(), ["shadow=none", "shadow.n_active=1"])


def test_a_type_that_reads_itself_from_text_is_asked_to():
    changed = overrides.apply_overrides(Mixture(), ["corpora=a.txt,b/"])
    assert changed.corpora == (Corpus(path="a.txt"), Corpus(path="b/"))
