"""Paged sparse MLA on Hopper: split of the work, launch, and what the Gluon kernels take."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.gluon_call import gluon_call
from pallas_kernels.paged_mla.gluon_gpu_kernel import attend_kernel, combine_kernel

LATENT_DIM, ROPE_DIM, SCALE_BLOCK = 512, 64, 128  # the official widths, DeepSeek-V3.2 config.json
HEAD_TILE, STEP_SLOTS = 64, 128  # heads of a program, slots of one turn of its loop
MAX_SPLITS = 16
# Costs in turns of a program's loop (4.4 us, H200, 2026-11-30): a program's start and end, the second kernel, and the
# second kernel's bytes for each split of each program.
START_COST, COMBINE_COST, PART_COST = 1.6, 0.3, 0.015
CONSUMER_REGISTERS = 216
CONSUMER_REGISTERS_FP8 = 200  # leaves the producer 104, for loads in flight


def check(
    q_THD: Float[Array, "*B T H D"],
    latent_NC: Float[Array, "N C"],
    rope_NR: Float[Array, "N R"],
    *,
    scale: float,
    latent_scale_NG: Float[Array, "N G"] | None = None,
) -> None:
    """Raise NotImplementedError, saying why, where the kernels cannot take the input."""
    widths = latent_NC.shape[1], rope_NR.shape[1]
    if widths != (LATENT_DIM, ROPE_DIM):
        raise NotImplementedError(f"takes widths {LATENT_DIM} and {ROPE_DIM}, got {widths}")
    if q_THD.dtype != jnp.bfloat16 or rope_NR.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"takes bfloat16 queries and rope keys, got {q_THD.dtype} and {rope_NR.dtype}"
        )
    n_scales = 0 if latent_scale_NG is None else latent_scale_NG.shape[1]
    kind = latent_NC.dtype.name, n_scales
    if kind not in (("bfloat16", 0), ("float8_e4m3fn", LATENT_DIM // SCALE_BLOCK)):
        raise NotImplementedError(
            f"takes bfloat16 latents or float8_e4m3fn ones with a scale per {SCALE_BLOCK} dims,"
            f" got {latent_NC.dtype} with {n_scales} scales"
        )
    if not scale > 0:
        raise NotImplementedError(f"takes a positive scale, got {scale}")
    dispatch.require_hopper()


def choose_splits(n_programs: int, n_slots: int) -> tuple[int, int]:
    """Return (splits of a row list, slots of a split): the fewest turns on the busiest multiprocessor.

    Args:
        n_programs: Queries times head tiles.
        n_slots: Length of the row lists.
    """
    n_turns = -(-n_slots // STEP_SLOTS)
    best = (math.inf, 1, n_turns)
    for n in range(1, min(MAX_SPLITS, n_turns) + 1):
        turns = -(-n_turns // n)
        n_splits = -(-n_turns // turns)
        waves = -(-n_programs * n_splits // dispatch.multiprocessors())
        cost = waves * (turns + START_COST)
        if n_splits > 1:
            cost += COMBINE_COST + PART_COST * n_programs * n_splits
        best = min(best, (cost, n_splits, turns))
    return best[1], best[2] * STEP_SLOTS


def constants(
    n_heads: int, n_slots: int, splits: tuple[int, int], scale: float, quantised: bool
) -> dict[str, int | float]:
    """Return the constexpr arguments of the attention kernel."""
    return {
        "n_heads": n_heads,
        "n_slots": n_slots,
        "n_splits": splits[0],
        "split_slots": splits[1],
        "scale_log2": scale * math.log2(math.e),
        "QUANTISED": quantised,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS_FP8 if quantised else CONSUMER_REGISTERS,
    }


def paged_mla(
    q_THD: Float[Array, "T H D"],
    latent_NC: Float[Array, "N C"],
    rope_NR: Float[Array, "N R"],
    latent_scale_NG: Float[Array, "N G"] | None,
    rows_TK: Int[Array, "T K"],
    scale: float,
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """Attend to the listed rows; see `op.paged_mla`. Takes what `check` lets pass.

    Differs from the reference: weights are rounded to bfloat16 relative to a running maximum, and e4m3 NaN codes,
    which quantisation of finite values never writes, read as 480.

    On an H200 (2026-11-30), 128 queries, 128 heads, 2048 random rows each: 138 us for bfloat16 (529 TFLOP/s), 205 us
    for FP8 (356).
    """
    n_queries, n_heads, _ = q_THD.shape
    n_slots = rows_TK.shape[1]
    if n_queries * n_slots == 0:
        empty = jnp.zeros((n_queries, n_heads, LATENT_DIM), rope_NR.dtype)
        return empty, jnp.full((n_queries, n_heads), -jnp.inf, jnp.float32)
    head_tiles = -(-n_heads // HEAD_TILE)
    n_splits, split_slots = choose_splits(n_queries * head_tiles, n_slots)
    quantised = latent_scale_NG is not None
    final = (
        jax.ShapeDtypeStruct((n_queries, n_heads, LATENT_DIM), jnp.bfloat16),
        jax.ShapeDtypeStruct((n_queries, n_heads), jnp.float32),
    )
    parts = tuple(jax.ShapeDtypeStruct((n_splits, *f.shape), jnp.float32) for f in final)
    out, lse = gluon_call(
        attend_kernel,
        q_THD,
        latent_NC,
        rope_NR,
        rope_NR
        if latent_scale_NG is None
        else latent_scale_NG,  # the kernel does not touch the stand-in
        rows_TK.astype(jnp.int32),
        out=final if n_splits == 1 else parts,
        grid=(n_queries * head_tiles * n_splits,),
        constants=constants(n_heads, n_slots, (n_splits, split_slots), scale, quantised),
        scalars=(latent_NC.shape[0], n_queries),
    )
    if n_splits == 1:
        return out, lse
    n_rows = n_queries * n_heads
    out, lse = gluon_call(
        combine_kernel,
        out,
        lse,
        out=final,
        grid=(n_rows,),
        constants={"n_splits": n_splits},
        scalars=(n_rows,),
    )
    return out, lse
