# ruff: noqa: E501  # lines of a program are as long as the compiler prints them
import pytest

from train import hlo, live_buffers, roofline

# The shape of what libtpu 0.0.48 prints, cut down.
TEXT = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

FileNames
1 "/home/me/repo/dsv32_jax/mla.py"
2 "/usr/lib/python/site-packages/jax/x.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=15 end_line=15 column=6 end_column=6}
2 {file_name_id=2 function_name_id=1 line=13 end_line=13 column=12 end_column=12}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%sliced (p0: f32[6,16,128], p1: s32[]) -> f32[1,16,128] {
  %p0 = f32[6,16,128]{2,1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %ds = f32[1,16,128]{2,1,0:T(8,128)} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,16,128}
}

%updated (p0.1: f32[6,16,128], p1.1: f32[1,16,128], p2.1: s32[]) -> f32[6,16,128] {
  %p0.1 = f32[6,16,128]{2,1,0:T(8,128)} parameter(0)
  %p1.1 = f32[1,16,128]{2,1,0:T(8,128)} parameter(1)
  %p2.1 = s32[]{:T(128)} parameter(2)
  %zero.1 = s32[]{:T(128)} constant(0)
  ROOT %dus = f32[6,16,128]{2,1,0:T(8,128)} dynamic-update-slice(%p0.1, %p1.1, %p2.1, %zero.1, %zero.1)
}

%all-reduce-scatter.1 (input: f32[16,128]) -> f32[4,128] {
  %input = f32[16,128]{1,0:T(8,128)} parameter(0)
  ROOT %all-reduce.7 = f32[16,128]{1,0:T(8,128)} all-reduce(%input), channel_id=7, replica_groups={{0,1,2,3}}, to_apply=%add
}

%condition (state: (s32[], f32[6,16,128])) -> pred[] {
  %bound = s32[]{:T(128)} constant(6)
  %state = (s32[]{:T(128)}, f32[6,16,128]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

%body (state.1: (s32[], f32[6,16,128])) -> (s32[], f32[6,16,128]) {
  %state.1 = (s32[]{:T(128)}, f32[6,16,128]{2,1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %stack = f32[6,16,128]{2,1,0:T(8,128)} get-tuple-element(%state.1), index=1
  %slice = f32[1,16,128]{2,1,0:T(8,128)} fusion(%stack, %i.1), kind=kLoop, calls=%sliced
  %early = f32[4,16,128]{2,1,0:T(8,128)} broadcast(%slice), dimensions={1,2}
  %used = f32[16,128]{1,0:T(8,128)S(1)} negate(%early)
  %gathered = f32[4,16,128]{2,1,0:T(8,128)} all-gather(%slice), channel_id=3, replica_groups=mesh['axis_0'=4] {'axis_0'}, dimensions={0}
  %scattered = f32[4,128]{1,0:T(8,128)} fusion(%slice), kind=kCustom, calls=%all-reduce-scatter.1
  %fast = f32[4,16,128]{2,1,0:T(8,128)S(1)} negate(%gathered), metadata={op_name="jit(f)/mul" stack_frame_id=2}
  %new = f32[6,16,128]{2,1,0:T(8,128)} fusion(%stack, %slice, %i.1), kind=kLoop, calls=%updated
  ROOT %out = (s32[]{:T(128)}, f32[6,16,128]{2,1,0:T(8,128)}) tuple(%i.1, %new)
}

ENTRY %main (x: f32[6,16,128]) -> f32[6,16,128] {
  %x = f32[6,16,128]{2,1,0:T(8,128)} parameter(0)
  %start = s32[]{:T(128)} constant(0)
  %copy = f32[6,16,128]{2,1,0:T(8,128)} copy(%x)
  %init = (s32[]{:T(128)}, f32[6,16,128]{2,1,0:T(8,128)}) tuple(%start, %copy)
  %loop = (s32[]{:T(128)}, f32[6,16,128]{2,1,0:T(8,128)}) while(%init), condition=%condition, body=%body
  ROOT %result = f32[6,16,128]{2,1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""
ROOTS = ("/dsv32_jax/",)


@pytest.fixture(scope="module")
def program():
    return hlo.parse(TEXT)


def named(program, name):
    return next(i for c in program.computations.values() for i in c if i.name == name)


def test_a_loops_body_runs_as_often_as_its_condition_says(program):
    times = {instruction.name: n for instruction, n in program.runs()}
    assert times["gathered"] == 6
    assert times["copy"] == 1
    assert "ds" not in times  # inside a fusion


def test_an_instruction_is_taken_apart(program):
    found = named(program, "gathered")
    assert (found.opcode, found.operands, found.is_root) == ("all-gather", ("slice",), False)
    assert named(program, "out").shape.startswith("(s32[]")
    assert named(program, "out").opcode == "tuple"
    assert program.entry == "main"


def test_the_line_is_the_projects_own_innermost_one(program):
    assert program.source(named(program, "fast"), ROOTS) == "dsv32_jax/mla.py:15"
    assert program.source(named(program, "copy"), ROOTS) == ""


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (("f32", "16,128", "1,0:T(8,128)"), 16 * 128 * 4),
        (("bf16", "9,100", "1,0:T(8,128)(2,1)"), 16 * 128 * 2),  # filled up to whole tiles
        (("bf16", "9,100", "0,1:T(8,128)(2,1)"), 128 * 104 * 2),  # the other dimension is minor
        (("f32", "16,128", "1,0:T(8,128)S(1)"), 0),  # on-chip memory
        (("pred", "128", "0:T(512)"), 512),
        (("s32", "", ":T(128)"), 4),
        (("f8e4m3fn", "32,128", "1,0:T(8,128)(4,1)"), 32 * 128),
    ],
)
def test_an_arrays_bytes_count_its_tiles(array, expected):
    assert hlo.array_bytes(*array) == expected


def test_the_peak_holds_the_loops_state_once_and_the_bodys_largest_moment(program):
    stack, layer, gathered, shard = 6 * 8192, 8192, 4 * 8192, 8 * 128 * 4
    live = live_buffers.at_peak(program)
    # while the gathered array is read, the slice and the scattered shard are alive too, and the early one no more
    assert live.bytes == pytest.approx(stack + layer + gathered + shard, abs=64)
    assert [i.name for i, _ in live.makers[:2]] == ["copy", "gathered"]


def test_memory_traffic_counts_the_parts_that_slices_and_updates_touch(program):
    stack, layer = 6 * 8192, 8192
    gathered, shard = 4 * layer, 8 * 128 * 4
    copy = 2 * stack
    slice_ = 2 * layer
    all_gather = layer + gathered
    scatter = layer + shard
    fast = gathered  # its result stays on the chip
    update = 2 * layer
    early = layer + 2 * gathered  # read, written and read again
    expected = copy + 6 * (slice_ + early + all_gather + scatter + fast + update)
    moved = sum(size for _, size, _ in roofline.memory_traffic(program))
    assert moved == pytest.approx(expected, rel=0.002)
