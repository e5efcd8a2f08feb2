# ruff: noqa: E501  # lines of a program are as long as the compiler prints them
import dataclasses
import itertools
import types

import pytest

from train import collectives, hlo, roofline
from train.collectives import Collective
from train.topology import CHIPS

TEXT = """\
HloModule jit_f, is_scheduled=true

%all-reduce-scatter.1 (input: f32[16,128]) -> f32[4,128] {
  %input = f32[16,128]{1,0:T(8,128)} parameter(0)
  ROOT %all-reduce.7 = f32[16,128]{1,0:T(8,128)} all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%add
}

%in_fusion (input.1: bf16[8,128]) -> bf16[8,128] {
  %input.1 = bf16[8,128]{1,0} parameter(0)
  ROOT %all-reduce.8 = bf16[8,128]{1,0} all-reduce(%input.1), replica_groups=[2,2]<=[4], to_apply=%add
}

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %f32 = f32[16,128]{1,0} convert(%x)
  %ag = (bf16[8,128]{1,0}, bf16[32,128]{1,0:S(1)}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %agd = bf16[32,128]{1,0:S(1)} all-gather-done(%ag)
  %rs = f32[4,128]{1,0} fusion(%f32), kind=kCustom, calls=%all-reduce-scatter.1
  %ar = bf16[8,128]{1,0} fusion(%x), kind=kCustom, calls=%in_fusion
  %aa = (bf16[4,128]{1,0}, bf16[4,128]{1,0}) all-to-all(%x, %x), replica_groups={{0,1}}
  %rs2 = bf16[2,128]{1,0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
  %cp = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,2},{3,0}}
  ROOT %cpd = bf16[8,128]{1,0} collective-permute-done(%cp)
}
"""


def test_each_collective_is_found_once_with_the_bytes_of_the_whole_array():
    found = [(c.kind, c.bytes) for c in collectives.find(hlo.parse(TEXT))]
    assert found == [
        ("all-gather", 32 * 128 * 2),
        ("reduce-scatter", 16 * 128 * 4),
        ("all-reduce", 8 * 128 * 2),
        ("all-to-all", 8 * 128 * 2),
        ("reduce-scatter", 8 * 128 * 2),
        ("collective-permute", 8 * 128 * 2),
    ]


def test_a_collective_that_sparse_cores_run_is_found_and_its_bytes_are_moved_once():
    program = hlo.parse("""\
%offloaded (p: bf16[8,128]) -> bf16[32,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  ROOT %all-gather.4 = bf16[32,128]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (x: bf16[8,128]) -> bf16[32,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %started = ((bf16[8,128]{1,0}), bf16[32,128]{1,0}, s32[]{:S(2)}) call-start(%x), async_execution_thread="sparsecore", to_apply=%offloaded
  ROOT %done = bf16[32,128]{1,0} call-done(%started)
}
""")
    assert [(c.kind, c.bytes, c.times) for c in collectives.find(program)] == [
        ("all-gather", 8192, 1)
    ]
    assert sum(size for _, size, _ in roofline.memory_traffic(program)) == 8192 + 2048


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups={{4,5},{6,7}}, x", (4, 5)),
        ("replica_groups=[2,4]<=[8], x", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", (0, 4)),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2), x", (0, 1, 4, 5)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, x", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, x", (0, 4)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}, x", (0, 4)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}, x", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}, x", (0, 1, 4, 5)),
        ("source_target_pairs={{0,1},{7,0}}", (7, 0)),
        ("nothing", ()),
    ],
)
def test_a_group_is_read_in_each_form(text, group):
    assert collectives.group_of(text) == group


# Round figures: a link passes 100 bytes a second, the other network 10.
CHIP = dataclasses.replace(CHIPS["v5p"], flops=1000.0, hbm_bytes_per_s=50.0, link_bytes_per_s=100.0, dcn_bytes_per_s=10.0)  # fmt: skip


def torus(*shape, slices=1):
    places = itertools.product(range(slices), *(range(size) for size in shape))
    return [types.SimpleNamespace(slice_index=s, coords=coords) for s, *coords in places]


@pytest.mark.parametrize(
    ("kind", "group", "devices", "seconds"),
    [
        ("all-gather", (0, 1, 2, 3), torus(4), 800 * 3 / 4 / 200),  # one ring, both ways
        ("all-gather", tuple(range(16)), torus(4, 4), 800 * 15 / 16 / 400),  # two rings
        ("reduce-scatter", (0, 1, 2, 3), torus(4), 800 * 3 / 4 / 200),
        ("all-reduce", (0, 1, 2, 3), torus(4), 2 * 800 * 3 / 4 / 200),
        ("all-to-all", tuple(range(8)), torus(8), 800 * 7 / 8 * 2 / 200),
        ("collective-permute", (0, 1), torus(4), 800 / 100),
        ("all-gather", (0,), torus(4), 0.0),
        # 4 devices of 2 slices: half of it comes from the other slice, 4 devices share that
        ("all-gather", tuple(range(8)), torus(4, slices=2), 800 * 3 / 4 / 200 + 400 / 40),
    ],
)
def test_the_links_time_of_a_collective(kind, group, devices, seconds):
    found = collectives.seconds(kind, 800, group, devices, CHIP)
    assert found == pytest.approx(seconds)


def test_a_roofline_divides_by_the_peaks_and_mfu_by_the_time():
    gather = Collective("all-gather", 800, 5, (0, 1, 2, 3), None, "")

    times = roofline.roofline(4000.0, 300.0, [gather], torus(4), CHIP)

    assert times == pytest.approx((4.0, 6.0, 15.0))
    assert times.best_s == 15.0
    assert times.serial_s == 25.0
    assert roofline.mfu(5000.0, times.serial_s, CHIP) == pytest.approx(0.2)
