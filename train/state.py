"""The training state: parameters, what trains of them, and the optimizer's moments, born on their devices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv32_jax import parameters
from dsv32_jax.config import ModelConfig
from dsv32_jax.parameters import Arrays, Parameters, is_indexer
from train.stage import INDEXER_TRAINS, RL, Stage


class TrainState(NamedTuple):
    """Everything a step reads and writes; `abstract` and `shardings` fill the same tree with other leaves.

    Attributes:
        parameters: All of the model, float32.
        opt_state: Moments of what trains in this stage, and nothing else.
        step: int32, optimizer steps done in this stage.
    """

    parameters: Parameters
    opt_state: Any
    step: Any


def trains(stage: Stage, name: str) -> bool:
    """Tell whether a weight moves in a stage: only indexers in the warm-up; none where it is unused or fixed.

    Args:
        stage: The stage.
        name: The weight's dotted name.

    Returns:
        True if it has gradients and optimizer state.
    """
    if stage == "warmup":
        return is_indexer(name)
    if stage in RL and name.startswith("mtp."):
        return False
    return stage in INDEXER_TRAINS or not is_indexer(name)


def trainable(stage: Stage, weights: Arrays) -> Arrays:
    """Return the weights that move in a stage."""
    return {name: value for name, value in weights.items() if trains(stage, name)}


def create(
    params: Parameters, optimizer: optax.GradientTransformation, stage: Stage, layout: "TrainState"
) -> TrainState:
    """Start a stage from parameters: fresh moments, step 0.

    Args:
        params: The model's arrays.
        optimizer: Its transformation.
        stage: The stage.
        layout: `shardings(...)` of the state.

    Returns:
        The state, moments born on their devices.
    """
    moving = trainable(stage, params.weights)
    opt_state = jax.jit(optimizer.init, out_shardings=layout.opt_state)(moving)
    return TrainState(params, opt_state, jax.device_put(jnp.zeros((), jnp.int32), layout.step))


def abstract(cfg: ModelConfig, optimizer: optax.GradientTransformation, stage: Stage) -> TrainState:
    """Return the state's shapes.

    Args:
        cfg: The model.
        optimizer: Its transformation.
        stage: The stage.

    Returns:
        TrainState of jax.ShapeDtypeStruct.
    """
    params = parameters.abstract(cfg)
    opt_state = jax.eval_shape(optimizer.init, trainable(stage, params.weights))
    return TrainState(params, opt_state, jax.ShapeDtypeStruct((), jnp.int32))


def shardings(
    cfg: ModelConfig,
    optimizer: optax.GradientTransformation,
    stage: Stage,
    mesh: Mesh | AbstractMesh,
) -> TrainState:
    """Return where every array of the state lives: moments beside their weights, scalars everywhere.

    Args:
        cfg: The model.
        optimizer: Its transformation.
        stage: The stage.
        mesh: The mesh.

    Returns:
        TrainState of NamedSharding.
    """
    params = parameters.shardings(cfg, mesh)
    everywhere = NamedSharding(mesh, P())

    def beside_weight(path: tuple, leaf: Any) -> NamedSharding:
        name = getattr(path[-1], "key", None)
        return params.weights[name] if leaf.ndim and name in params.weights else everywhere

    opt_state = abstract(cfg, optimizer, stage).opt_state
    return TrainState(
        params, jax.tree_util.tree_map_with_path(beside_weight, opt_state), everywhere
    )


def on_devices(shapes: Any, layout: Any) -> Any:
    """Join shapes with where they live, as a restored checkpoint needs them.

    Args:
        shapes: Tree of jax.ShapeDtypeStruct.
        layout: The same tree of shardings.

    Returns:
        Tree of jax.ShapeDtypeStruct with shardings.
    """
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        layout,
    )
