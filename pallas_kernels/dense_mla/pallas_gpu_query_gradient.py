"""The last step of the backward on Hopper: dq out of the order in which the kernel has summed it."""

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import mosaic_hopper as asm
from pallas_kernels.dense_mla import pallas_gpu_registers as registers
from pallas_kernels.dense_mla import tiles
from pallas_kernels.mosaic_hopper import Ref

ROWS = tiles.HALF
SWIZZLE = 64  # bytes: half of q's columns is a multiple of 32 elements only


def from_fragments(
    sums: Float[Array, "H N 2 F P 4"], n_queries: int, dim: int, scale: float
) -> Float[Array, "T H D"]:
    """Turn the sums of dS k in fragment order into dq = scale * sums, bfloat16."""
    n_heads, n_steps = sums.shape[:2]
    half = dim // 2

    def body(sums_ref: Ref, dq_ref: Ref, smem: Ref) -> None:
        step, head = lax.axis_index("step"), lax.axis_index("head")
        for h in range(2):
            x = registers.load_fragments(sums_ref.at[head, step, h], half)
            smem[h] = (x * scale).astype(jnp.bfloat16)
        plgpu.commit_smem()
        for h in range(2):
            target = dq_ref.at[pl.ds(step * ROWS, ROWS), head, pl.ds(h * half, half)]
            plgpu.copy_smem_to_gmem(smem.at[h], target)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n_queries, n_heads, dim), jnp.bfloat16),
        scratch_types=(plgpu.SMEM((2, ROWS, half), jnp.bfloat16, transforms=asm.operand(SWIZZLE)),),
        grid=(n_heads, n_steps),
        grid_names=("head", "step"),
        kernel_name="dense_mla_query_gradient",
    )(sums)
