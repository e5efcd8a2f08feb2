import importlib.util
import os

import pytest

from dsv32_jax.errors import UsageError
from train import topology
from train.topology import CHIPS, Topology


@pytest.mark.parametrize(
    ("text", "expected", "devices"),
    [
        ("v5p:8x8x8", Topology(kind="v5p", shape=(8, 8, 8)), 512),
        ("v6e:16x16@4", Topology(kind="v6e", shape=(16, 16), slices=4), 1024),
        ("tpu7x:4x4x4", Topology(kind="tpu7x", shape=(4, 4, 4)), 128),  # two devices a chip
    ],
)
def test_a_topology_is_read_and_named_alike(text, expected, devices):
    assert topology.parse(text) == expected
    assert str(expected) == text
    assert expected.n_devices == devices


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v5p", "must be KIND:SHAPE"),
        ("v5p:8x8x8@", "must be KIND:SHAPE"),
        ("v5p:8", "must be KIND:SHAPE"),
        ("v9:8x8", "v9 must be one of v5e, v5p"),
        ("v5p:8x8", "a slice of v5p has 3 dimensions"),
        ("v6e:16x0", "no size may be 0"),
        ("v6e:16x16@0", "no size may be 0"),
        ("v5e:2x2@100000", "400000 devices are more than 65536"),
        ("v5p:100x100x100", "1000000 devices are more than 65536"),
        ("tpu7x:32x32x33", "67584 devices are more than 65536"),  # two a chip
    ],
)
def test_a_wrong_topology_is_named(text, said):
    with pytest.raises(UsageError, match=said) as error:
        topology.parse(text)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("bad\nlong story"), NotImplementedError(), ValueError("bad")]
)
def test_a_slice_that_libtpu_refuses_is_one_line_with_the_shapes_that_there_are(error, monkeypatch):
    from jax.experimental import topologies

    def refuse(**asked):
        assert asked == {"platform": "tpu", "topology_name": "v6e:2x3", "num_slices": 2}
        raise error

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(UsageError) as found:
        topology.describe(topology.parse("v6e:2x3@2"))
    said = str(found.value)
    assert said.startswith(
        "topology v6e:2x3@2: libtpu knows no such slice; shapes of v6e are 2x2, 4x4,"
    )
    assert said.endswith("(NotImplementedError)" if type(error) is NotImplementedError else "(bad)")


def test_without_libtpu_its_extra_is_named(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs libtpu, pip install dsv32-jax\[tpu\]"):
        topology.describe(topology.parse("v6e:2x2"))


@pytest.mark.tpu_aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("text", ["v5e:1x1", "v6e:2x5", "v5p:3x3x3", "tpu7x:1x1x1", "v5p:2x3x5@2"])
def test_libtpu_itself_refuses_what_no_host_makes_up(text, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(UsageError, match=f"topology {text}: libtpu knows no such slice") as found:
        topology.describe(topology.parse(text))
    assert "\n" not in str(found.value)


def test_smaller_slices_come_large_to_small():
    names = [str(one) for one in topology.smaller(topology.parse("v5p:4x4x8"))]
    assert names == ["v5p:4x4x4", "v5p:2x4x4", "v5p:2x2x4", "v5p:2x2x2", "v5p:2x2x1"]


@pytest.mark.parametrize("kind", CHIPS)
def test_a_kinds_shapes_have_its_dimensions_and_grow(kind):
    found = [topology.parse(f"{kind}:{shape}") for shape in CHIPS[kind].shapes]
    chips = [one.n_chips for one in found]
    assert chips == sorted(chips)
