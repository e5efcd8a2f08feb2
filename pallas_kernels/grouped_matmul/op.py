"""Public op: matrix products of row groups, each with its own weight."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import reference, tiles

FOLDER = "pallas_kernels.grouped_matmul."
PALLAS = FOLDER + "pallas_gpu"


def preferred_order() -> tuple[str, ...]:
    """Return the order of the forms without kernels: "blocked" first on a CPU, else "ragged_dot".

    On a CPU ragged_dot multiplies every row by every group: 17 ms against 1.5 ms for [4096, 128] x [8, 128, 96] on 2
    cores (jax 0.11.2, 2026-11-29). So it does on a GPU, but there blocks copy a weight each: 30 GB for 131,072 rows of
    the released experts.
    """
    both = ("blocked", "ragged_dot")
    return both if dispatch.platform() == "cpu" else both[::-1]


def grouped_matmul(
    x_MK: Float[Array, "M K"],
    w_EKN: Float[Array, "E K N"],
    group_sizes: Int[Array, " E"],
    *,
    align: int,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Multiply each group of consecutive rows by its own weight.

    `out[m] = x[m] @ w[e]` where row m lies in group e: groups follow each other from row 0, group e has
    `group_sizes[e]` rows. Rows past the last group give 0. Results of "pallas_gpu", the default where it takes the
    input, carry no types of varying axes: a `jax.shard_map` around it needs `check_vma=False`.

    Args:
        x_MK: Rows, sorted by group.
        w_EKN: One weight per group.
        group_sizes: int, each a multiple of `align`, summing to at most M (not checked: a traced value).
        align: Rows that share one weight in the blocked form; divides M.
        implementation: "pallas_gpu" (Hopper, bfloat16, K and N multiples of 64, at least 256), "pallas_tpu" (jax's
            megablox kernels, by name only), "ragged_dot", "blocked", or "reference" for the better of the last two;
            None picks the best.

    Returns:
        Products in the dtype of `x_MK`.

    Raises:
        ValueError: If `align` does not divide M or `implementation` is unknown.
        NotImplementedError: If the named implementation cannot take the input.
    """
    if align < 1 or x_MK.shape[0] % align:
        raise ValueError(f"grouped_matmul: align={align} must divide M={x_MK.shape[0]}")

    if 0 in (*x_MK.shape, *w_EKN.shape):
        return jnp.zeros((x_MK.shape[0], w_EKN.shape[2]), x_MK.dtype)

    def check() -> None:
        dispatch.require_hopper()
        dispatch.load(PALLAS).check(x_MK, w_EKN)

    def check_tpu() -> None:
        dispatch.require_tpu()
        dispatch.load(FOLDER + "pallas_tpu").check(x_MK, w_EKN)

    if implementation == "reference":
        implementation = preferred_order()[0]
    # "pallas_tpu" comes last: XLA has a grouped kernel of its own on TPU, and neither was timed.
    choices = {"pallas_gpu": check, **dict.fromkeys(preferred_order()), "pallas_tpu": check_tpu}
    name = dispatch.choose("grouped_matmul", implementation, choices)
    if name == "pallas_tpu":
        return _on_tpu(x_MK, w_EKN, group_sizes)
    if name == "pallas_gpu":
        return _on_hopper(x_MK, w_EKN, group_sizes, align)
    if name == "ragged_dot":
        return reference.ragged(x_MK, w_EKN, group_sizes)
    return reference.blocked(x_MK, w_EKN, group_sizes, align)


def _on_hopper(x_MK: Array, w_EKN: Array, sizes_E: Array, align: int) -> Array:
    """Run the kernels; groups that do not start at multiples of 8 rows are copied to places that do."""
    if align % tiles.ROW_UNIT == 0:
        return _pallas(x_MK, w_EKN, sizes_E, align)
    place_M, padded_E, n_places = tiles.spread_rows(sizes_E, x_MK.shape[0])
    spread = jnp.zeros((n_places, x_MK.shape[1]), x_MK.dtype)
    spread = spread.at[place_M].set(x_MK, unique_indices=True)
    return _pallas(spread, w_EKN, padded_E, tiles.ROW_UNIT)[place_M]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _pallas(x_MK: Array, w_EKN: Array, sizes_E: Array, align: int) -> Array:
    return dispatch.load(PALLAS).multiply_rows(x_MK, w_EKN, sizes_E, align=align)


def _pallas_fwd(x_MK: Array, w_EKN: Array, sizes_E: Array, align: int) -> tuple[Array, tuple]:
    return _pallas(x_MK, w_EKN, sizes_E, align), (x_MK, w_EKN, sizes_E)


def _pallas_bwd(align: int, saved: tuple, d_out_MN: Array) -> tuple[Array, Array, None]:
    x_MK, w_EKN, sizes_E = saved
    kernels = dispatch.load(PALLAS)
    d_x_MK = kernels.multiply_rows(d_out_MN, w_EKN, sizes_E, align=align, transposed=True)
    return d_x_MK, kernels.weight_gradient(x_MK, d_out_MN, sizes_E, align=align), None


_pallas.defvjp(_pallas_fwd, _pallas_bwd)


@jax.custom_vjp
def _on_tpu(x_MK: Array, w_EKN: Array, sizes_E: Array) -> Array:
    return dispatch.load(FOLDER + "pallas_tpu").multiply_rows(x_MK, w_EKN, sizes_E)


def _on_tpu_fwd(x_MK: Array, w_EKN: Array, sizes_E: Array) -> tuple[Array, tuple]:
    return _on_tpu(x_MK, w_EKN, sizes_E), (x_MK, w_EKN, sizes_E)


def _on_tpu_bwd(saved: tuple, d_out_MN: Array) -> tuple[Array, Array, None]:
    x_MK, w_EKN, sizes_E = saved
    kernels = dispatch.load(FOLDER + "pallas_tpu")
    d_x_MK = kernels.multiply_rows(d_out_MN, w_EKN, sizes_E, transposed=True)
    return d_x_MK, kernels.weight_gradient(x_MK, d_out_MN, sizes_E), None


_on_tpu.defvjp(_on_tpu_fwd, _on_tpu_bwd)
