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
    ],
)
def test_a_wrong_topology_is_named(text, said):
    with pytest.raises(UsageError, match=said) as error:
        topology.parse(text)
    assert text in str(error.value)


def test_smaller_slices_come_large_to_small():
    names = [str(one) for one in topology.smaller(topology.parse("v5p:4x4x8"))]
    assert names == ["v5p:4x4x4", "v5p:2x4x4", "v5p:2x2x4", "v5p:2x2x2", "v5p:2x2x1"]


@pytest.mark.parametrize("kind", CHIPS)
def test_a_kinds_shapes_have_its_dimensions_and_grow(kind):
    found = [topology.parse(f"{kind}:{shape}") for shape in CHIPS[kind].shapes]
    chips = [one.n_chips for one in found]
    assert chips == sorted(chips)
