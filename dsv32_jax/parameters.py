"""A model as a flat dict of named arrays, and back: the form that optimizers, checkpoints and layouts work on."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dsv32_jax import sharding
from dsv32_jax.config import Dtype, ModelConfig
from dsv32_jax.gate import RouterBias
from dsv32_jax.model import DeepSeekV32, abstract_model

Arrays = dict[str, Any]

# Logical axes of each parameter by its last two names; a stack of layers adds a leading axis that is not sharded.
LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", "embed"),
    "head": ("embed", "vocab"),
    "attn.wq_a": ("embed", None),
    "attn.wq_b": ("embed", "heads", None),
    "attn.wkv_a": ("embed", None),
    "attn.wkv_b": ("embed", "heads", None),
    "attn.wo": ("heads", None, "embed"),
    "indexer.wq_b": ("embed", None, None),
    "indexer.wk": ("embed", None),
    "indexer.weights_proj": ("embed", None),
    "ffn.w1": ("embed", "ffn"),
    "ffn.w3": ("embed", "ffn"),
    "ffn.w2": ("ffn", "embed"),
    "gate.weight": ("embed", None),
    "gate.bias": (None,),
    "moe.w1": ("experts", "expert_embed", "ffn"),
    "moe.w3": ("experts", "expert_embed", "ffn"),
    "moe.w2": ("experts", "ffn", "expert_embed"),
    "shared.w1": ("embed", "ffn"),
    "shared.w3": ("embed", "ffn"),
    "shared.w2": ("ffn", "embed"),
    "mtp.eh_proj": ("embed", None),
}
STACKS = ("dense_layers.", "moe_layers.")
# Weights that enter float32 products, by the last part of their names, whatever the model's dtype.
FLOAT32_WEIGHTS = ("head", "gate.weight", "weights_proj", "norm.weight", "norm.bias")


class Parameters(NamedTuple):
    """A model's arrays by dotted name.

    Attributes:
        weights: Trained by gradients, float32.
        router_bias: Moved by the load rule, float32.
    """

    weights: Arrays
    router_bias: Arrays


def logical_axes(name: str) -> tuple[str | None, ...]:
    """Return the logical axes of a parameter.

    Args:
        name: Dotted name, for example "moe_layers.attn.wq_b".

    Returns:
        One logical axis, or None, per dimension.

    Raises:
        KeyError: If the table has no entry.
    """
    last_two = ".".join(name.split(".")[-2:])
    if last_two.split(".")[0].endswith("norm"):
        axes: tuple[str | None, ...] = (None,)
    else:
        axes = LOGICAL_AXES[last_two]
    return (None, *axes) if name.startswith(STACKS) else axes


def product_dtype(name: str, cfg: ModelConfig) -> Dtype:
    """Return the dtype a weight has in its products, which is enough to keep where it is not trained.

    Args:
        name: Dotted name.
        cfg: The model.

    Returns:
        "float32", or the model's dtype.
    """
    return "float32" if name.endswith(FLOAT32_WEIGHTS) else cfg.dtype


def is_indexer(name: str) -> bool:
    """Tell whether a parameter belongs to a lightning indexer."""
    return ".indexer." in name


def group_of(name: str) -> str:
    """Return the field of `Parameters` that holds a parameter."""
    return "router_bias" if name.endswith("gate.bias") else "weights"


def flatten(model: DeepSeekV32) -> Parameters:
    """Name every array of a model.

    Args:
        model: Of arrays or of shapes.

    Returns:
        Its arrays.
    """
    weights, bias = (nnx.state(model, kind) for kind in (nnx.Param, RouterBias))
    return Parameters(_named(weights), _named(bias))


def _named(state: Any) -> Arrays:  # nnx.State, whose own annotation beartype warns about
    pairs = nnx.to_flat_state(state)
    return {".".join(map(str, path)): variable.get_value() for path, variable in pairs}


@functools.cache
def _template(cfg: ModelConfig) -> tuple[Any, Any]:
    return nnx.split(abstract_model(cfg))


def assemble(cfg: ModelConfig, parameters: Parameters) -> DeepSeekV32:
    """Put named arrays into a model.

    Args:
        cfg: The model.
        parameters: Every array of it.

    Returns:
        The model.

    Raises:
        ValueError: If a name is missing or unknown.
    """
    arrays = parameters.weights | parameters.router_bias
    graph, state = _template(cfg)
    pairs = nnx.to_flat_state(state)
    names = {".".join(map(str, path)) for path, _ in pairs}
    if names != arrays.keys():
        wrong = sorted(names ^ arrays.keys())
        raise ValueError(
            f"parameters do not fit the model: {len(wrong)} names differ, first {wrong[0]}"
        )
    filled = [(path, var.replace(arrays[".".join(map(str, path))])) for path, var in pairs]
    return nnx.merge(graph, nnx.from_flat_state(filled))


@functools.cache
def abstract(cfg: ModelConfig) -> Parameters:
    """Return the parameters' shapes; traced once per model, so not to be changed in place.

    Args:
        cfg: The model.

    Returns:
        Parameters of jax.ShapeDtypeStruct.
    """
    return flatten(abstract_model(cfg))


def shardings(
    cfg: ModelConfig, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, *, training: bool = True
) -> Parameters:
    """Return where every parameter lives.

    Args:
        cfg: The model.
        mesh: The mesh.
        training: Also cut what is not an expert's along the expert axis, so that no device holds the optimizer's state
            of another; a model that only runs has no such state, and would gather those weights at every token.

    Returns:
        Parameters of NamedSharding.
    """

    def axes_of(name: str) -> tuple[str | None, ...]:
        axes = logical_axes(name)
        return axes if training else tuple("expert_embed" if a == "embed" else a for a in axes)

    shapes = abstract(cfg)
    axes = Parameters(*({name: axes_of(name) for name in group} for group in shapes))
    return sharding.parameter_shardings(mesh, shapes, axes)


def initialise(cfg: ModelConfig, seed: int, mesh: jax.sharding.Mesh) -> Parameters:
    """Draw a new model, every array born on its own devices.

    Args:
        cfg: The model.
        seed: Of the draw; the values do not depend on the mesh.
        mesh: The mesh.

    Returns:
        The parameters.
    """

    def draw(key: jax.Array) -> Parameters:
        return flatten(DeepSeekV32(cfg, rngs=nnx.Rngs(key)))

    # Each draw compiles for a third of a second on a CPU and runs once, so there the compiler need not try hard.
    options = (
        {"xla_backend_optimization_level": 0} if mesh.devices.flat[0].platform == "cpu" else None
    )
    run = jax.jit(draw, out_shardings=shardings(cfg, mesh), compiler_options=options)
    return run(jax.random.key(seed))


def load_balance_step(router_bias: Arrays, loads: Arrays, rate: float) -> Arrays:
    """Move the router bias of every expert against its load.

    `b_e += rate * sign(mean(load) - load_e)`, the load counted over the whole optimizer step's batch.

    Args:
        router_bias: float32 [..., E] by name.
        loads: Tokens per expert, the same shapes and names.
        rate: gamma.

    Returns:
        The new biases.

    Source: DeepSeek-V3 report, section 2.1.2.
    """

    def move(bias: jax.Array, load: jax.Array) -> jax.Array:
        return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)

    return {name: move(bias, loads[name]) for name, bias in router_bias.items()}
