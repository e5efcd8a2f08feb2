"""What Gluon kernels on Hopper share: instructions that Gluon does not offer, and the layout of copies."""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Of a group of four warps that copies rows of bf16: 16 bytes a thread, 8 threads a 128-byte line of a row.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
@no_type_check
def arrive(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Come to a named barrier without waiting; whoever waits there sees this thread's earlier memory accesses.

    Triton's own code uses barriers 0 to 3 of the 16 where there are two worker partitions; the rest is free.
    """
    gl.inline_asm_elementwise(
        f"bar.arrive {BARRIER}, {THREADS}; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1
    )


@gluon.jit
@no_type_check
def sync(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Wait at a named barrier until THREADS threads, this one among them, have come."""
    gl.inline_asm_elementwise(
        f"bar.sync {BARRIER}, {THREADS}; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1
    )


@gluon.jit
@no_type_check
def arrive_at(barrier, THREADS: gl.constexpr):
    """`arrive` at a barrier whose number is known at run time only; all threads must give the same."""
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {THREADS}; mov.u32 $0, 0;", "=r,r", [barrier], gl.int32, False, 1
    )


@gluon.jit
@no_type_check
def sync_at(barrier, THREADS: gl.constexpr):
    """`sync` at a barrier whose number is known at run time only; all threads must give the same."""
    gl.inline_asm_elementwise(
        f"bar.sync $1, {THREADS}; mov.u32 $0, 0;", "=r,r", [barrier], gl.int32, False, 1
    )


@gluon.jit
@no_type_check
def opaque_zero():
    """Return a 0 that LLVM cannot see through, to index stacks of shared tiles with, or to add to such an index.

    Otherwise LLVM hoists the descriptor of every wgmma out of the loop, more than the registers hold, and ptxas spills
    them (measured in the forward of sparse MLA: 354 instead of 613 TFLOP/s). ptxas still folds the 0.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
@no_type_check
def fast_exp2(x):
    """Return 2**x by the special function unit: error 2 ulp, results below 2**-126 become 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
@no_type_check
def fast_log2(x):
    """Return the logarithm in base 2 by the special function unit."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
@no_type_check
def declare_vote(NAME: gl.constexpr):
    """Declare the register that `any_positive` of this name works on; once, before any loop."""
    gl.inline_asm_elementwise(
        f".reg .f32 vote_{NAME}; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1
    )


@gluon.jit
@no_type_check
def any_positive(x, NAME: gl.constexpr):
    """Return 1 if any of the elements that this warp's threads hold is positive, else 0; each thread holds two.

    A branch on it costs no barrier, unlike one on a reduction over the whole tensor. It differs between warps, so
    inside the branch there may be arithmetic only. The value passes from the tensor to the scalar statement in a
    register named in the text of both, as Triton has no conversion that keeps it in the thread.
    """
    gl.inline_asm_elementwise(
        f"max.f32 vote_{NAME}, $2, $3; mov.b32 $0, $2; mov.b32 $1, $3;",
        "=f,=f,f,f",
        [x],
        gl.float32,
        False,
        2,
    )
    return gl.inline_asm_elementwise(
        f"{{ .reg .pred p; setp.gt.f32 p, vote_{NAME}, 0f00000000;"
        " vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p; }",
        "=r",
        [],
        gl.int32,
        False,
        1,
    )
