"""Small layers: norms, linear maps and the SwiGLU feed-forward."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
    """Return a float32 parameter drawn from N(0, std^2)."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


class RMSNorm(nnx.Module):
    """Divide by the root mean square and multiply by a weight, in float32."""

    def __init__(self, dim: int, *, eps: float):
        """Start from weight 1.

        Args:
            dim: Width of the normalised axis.
            eps: Added to the mean square.
        """
        self.weight = nnx.Param(jnp.ones(dim, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return `x * rsqrt(mean(x^2) + eps) * weight` in float32; the caller casts."""
        x = x.astype(jnp.float32)
        return (
            x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.weight[...]
        )


class LayerNorm(nnx.Module):
    """Subtract the mean, divide by the standard deviation, multiply by a weight and add a bias, in float32."""

    EPS = 1e-6  # DeepSeek-V3.2 inference/model.py LayerNorm

    def __init__(self, dim: int):
        """Start from weight 1, bias 0.

        Args:
            dim: Width of the normalised axis.
        """
        self.weight = nnx.Param(jnp.ones(dim, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(dim, jnp.float32))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Return `(x - mean) * rsqrt(var + eps) * weight + bias` in the dtype of `x`."""
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(
            jnp.mean(centred * centred, axis=-1, keepdims=True) + self.EPS
        )
        return (scaled * self.weight[...] + self.bias[...]).astype(x.dtype)


def project(equation: str, x: Array, weight: nnx.Param) -> Array:
    """Contract x with a weight cast to the dtype of x; accumulation is float32 inside the product."""
    return jnp.einsum(equation, x, weight[...].astype(x.dtype))


def swiglu(gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Float[Array, "... F"]:
    """Return `silu(gate) * up`, computed in float32, in the dtype of `gate`."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


class FeedForward(nnx.Module):
    """Plain SwiGLU feed-forward: `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, dim: int, hidden: int, std: float, *, rngs: nnx.Rngs):
        """Draw the weights.

        Args:
            dim: D, width in and out.
            hidden: F, width between.
            std: Standard deviation of the weights.
            rngs: Source of randomness.
        """
        self.w1 = normal(rngs, (dim, hidden), std)
        self.w3 = normal(rngs, (dim, hidden), std)
        self.w2 = normal(rngs, (hidden, dim), std)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply to each token."""
        gate = project("btd,df->btf", x_BTD, self.w1)
        up = project("btd,df->btf", x_BTD, self.w3)
        return project("btf,fd->btd", swiglu(gate, up), self.w2)
