"""Every option has a reader and a line of its class's docstring."""

import ast
import dataclasses
import inspect
import re
import typing
from pathlib import Path

import pytest

from dsv32_jax.convert import from_hf, to_hf
from dsv32_jax.generate.protocol import EngineConfig
from dsv32_jax.generate.sampling import SamplingParams
from dsv32_jax.serve.config import ServeConfig
from dsv32_jax.sharding import AXES, MeshConfig
from train.agents.endpoint import EndpointConfig
from train.evaluation.config import EvaluateConfig
from train.rl.agent_tasks import AgentConfig
from train.rl.rewards import RewardConfig, Weights
from train.rl.task_source import TaskConfig
from train.run_config import RunConfig
from train.sft_config import SftConfig

ROOT = Path(__file__).parents[2]
PACKAGES = ("pallas_kernels", "dsv32_jax", "train")
# Fields read by a computed name; the tests at the end of this file read each of them that way.
READ_BY_NAME = {
    MeshConfig: {f"{kind}_{axis}" for kind in ("ici", "dcn") for axis in AXES},
    RunConfig: {"dense", "warmup", "sparse"},
    Weights: {"correct", "format", "length", "language", "judge", "custom"},
}


def config_classes(root):
    """Return a dataclass and those that its fields may hold, at any depth."""
    found, todo = [], [root]
    while todo:
        cls = todo.pop()
        if cls in found:
            continue
        found.append(cls)
        for hint in typing.get_type_hints(cls).values():
            todo += [part for part in parts_of(hint) if dataclasses.is_dataclass(part)]
    return found


def parts_of(hint):
    inner = typing.get_args(hint)
    return [hint] if not inner else [part for arg in inner for part in parts_of(arg)]


ROOTS = (RunConfig, EngineConfig, SamplingParams, ServeConfig, from_hf.Options, to_hf.Options)
ROOTS += (RewardConfig, TaskConfig, SftConfig, EvaluateConfig, AgentConfig, EndpointConfig)
CLASSES = list(dict.fromkeys(cls for root in ROOTS for cls in config_classes(root)))


class Reads(ast.NodeVisitor):
    """Collect the attributes that code reads, a class's own `__post_init__` apart."""

    def __init__(self):
        self.names = {}  # attribute -> the (class, method) pairs that read it
        self._where = (None, None)

    def visit_ClassDef(self, node):
        for child in node.body:
            before, self._where = self._where, (node.name, getattr(child, "name", None))
            self.visit(child)
            self._where = before

    def visit_Attribute(self, node):
        if isinstance(node.ctx, ast.Load):
            self.names.setdefault(node.attr, set()).add(self._where)
        self.generic_visit(node)


@pytest.fixture(scope="module")
def reads():
    visitor = Reads()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            visitor.visit(ast.parse(path.read_text()))
    return visitor.names


def test_the_walk_finds_the_configs_of_every_part():
    names = {cls.__name__ for cls in CLASSES}

    assert {"RunConfig", "ModelConfig", "MLAConfig", "DataConfig", "Source", "Schedule"} <= names
    assert {"AdamConfig", "LossConfig", "MeshConfig", "EvidenceConfig", "LossGuardConfig"} <= names


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_field_is_read_somewhere(cls, reads):
    unread = [
        field.name
        for field in dataclasses.fields(cls)
        if field.name not in READ_BY_NAME.get(cls, ())
        and not reads.get(field.name, set()) - {(cls.__name__, "__post_init__")}
    ]

    assert unread == []


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_field_is_described_and_nothing_else_is(cls):
    attributes = inspect.getdoc(cls).partition("Attributes:\n")[2].partition("\n\n")[0]
    indent = re.match(" *", attributes).group()
    described = re.findall(rf"^{indent}(\w+): \S", attributes, flags=re.MULTILINE)

    assert described == [field.name for field in dataclasses.fields(cls)]


def test_the_mesh_reads_each_axis_by_its_name():
    for kind in ("ici", "dcn"):
        for axis in AXES:
            plain = MeshConfig(ici_fsdp=1)
            assert dataclasses.replace(plain, **{f"{kind}_{axis}": 2}).size(kind, axis) == 2


def test_a_run_reads_each_stage_by_its_name(tiny_run):
    for stage in READ_BY_NAME[RunConfig]:
        assert tiny_run.stage_config(stage) is getattr(tiny_run, stage)


def test_weights_are_read_by_their_names():
    weights = {name: i + 1.0 for i, name in enumerate(sorted(READ_BY_NAME[Weights]))}

    assert Weights(**weights).by_component() == weights
