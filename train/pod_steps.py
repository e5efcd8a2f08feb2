"""The real steps of a run with abstract arguments: shapes with places, from which they are traced and compiled."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv32_jax import cache as caches
from dsv32_jax import flops, load_model, parameters, sharding
from dsv32_jax.cache import CacheConfig
from dsv32_jax.config import ModelConfig, require
from dsv32_jax.errors import UsageError
from dsv32_jax.generate import steps
from dsv32_jax.generate.decoder import Decoder
from dsv32_jax.generate.sampling import Knobs
from dsv32_jax.model import DeepSeekV32
from train import state as states
from train import step_estimate
from train.losses import Batch
from train.optimizer import Rates, make_optimizer
from train.run_config import RunConfig
from train.stage import Stage, train_flops
from train.step import make_step


@dataclass(frozen=True, kw_only=True)
class ServingShape:
    """What prefill and decode are compiled for.

    Attributes:
        slots: Sequences decoded at once.
        max_len: Tokens of the longest sequence.
        prefill_chunk: Tokens of a prompt run at once.
        page_size: Tokens of a page of the cache.
    """

    slots: int = 128
    max_len: int = 4096
    prefill_chunk: int = 4096
    page_size: int = 64

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("slots", "max_len", "prefill_chunk"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")

    @property
    def piece(self) -> int:
        """Tokens of a prompt run at once: no more than a sequence has, as in the engine."""
        return min(self.prefill_chunk, self.max_len)


class PodStep(NamedTuple):
    """One step, ready to be traced under its mesh.

    Attributes:
        jitted: The function under jit, its arguments donated as when it runs.
        arguments: Trees of jax.ShapeDtypeStruct with shardings, and static values.
        tokens: Tokens it works on, over all devices.
        model_flops: FLOPs that the mathematics asks for, over all devices.
        seq_len: Length of the rows, whose square must be no buffer's size.
        n_stacked: Layers stacked along the first axis of a weight, which must not be gathered together.
        gradient_bytes: Of one device; like arguments they are cut finer on more devices.
    """

    jitted: Any
    arguments: tuple[Any, ...]
    tokens: int
    model_flops: float
    seq_len: int
    n_stacked: int = 0
    gradient_bytes: float = 0.0


def train_step(cfg: RunConfig, mesh: Mesh, stage: Stage) -> PodStep:
    """Describe one optimizer step of a stage.

    Args:
        cfg: The run; its mesh axes divide what they cut.
        mesh: The mesh, which is set in the context when the step is traced.
        stage: One of the run's stages.

    Returns:
        The step.
    """
    settings, data = cfg.stage_config(stage), cfg.stage_data(stage)
    optimizer = make_optimizer(settings.optimizer.adam)
    state = states.on_devices(
        states.abstract(cfg.model, optimizer, stage),
        states.shardings(cfg.model, optimizer, stage, mesh),
    )
    tokens = _place(mesh, (data.batch_size, data.seq_len), jnp.int32, "batch", "sequence")
    rate = _place(mesh, (), jnp.float32)
    with jax.set_mesh(mesh):
        step = make_step(
            cfg.model, settings.loss, settings.optimizer.adam, stage, settings.microbatches
        )
    n_tokens = data.batch_size * data.seq_len
    return PodStep(
        step,
        (state, Batch(tokens, tokens), Rates(rate, rate)),
        n_tokens,
        n_tokens * train_flops(cfg.model, data.seq_len, stage),
        data.seq_len,
        cfg.model.n_moe_layers,
        step_estimate.gradient_bytes(cfg, stage, mesh),
    )


def decode_step(cfg: RunConfig, mesh: Mesh, shape: ServingShape) -> PodStep:
    """Describe the step that draws one token for every sequence, at the longest context.

    Args:
        cfg: The run, whose model is served.
        mesh: The mesh.
        shape: Sequences and lengths.

    Returns:
        The step.
    """
    model, cache, pages = _serving_state(cfg.model, mesh, shape)
    row = _place(mesh, (shape.slots,), jnp.int32, "batch")
    table = _place(mesh, (shape.slots, pages), jnp.int32, "batch", None)
    knobs = _knobs(mesh, shape.slots, "batch")
    static = steps.Static(cfg.model, shape.page_size, "sparse", keep_sets=False)
    with jax.set_mesh(mesh):
        jitted = steps.compiled().decode
    arguments = (static, model, cache, row, row, table, knobs)
    model_flops = shape.slots * _extend_flops(cfg.model, shape.max_len, 1)
    return PodStep(jitted, arguments, shape.slots, model_flops, shape.max_len)


def prefill_step(cfg: RunConfig, mesh: Mesh, shape: ServingShape) -> PodStep:
    """Describe the step that adds the last piece of the longest prompt to the cache.

    Args:
        cfg: The run, whose model is served.
        mesh: The mesh.
        shape: Sequences and lengths.

    Returns:
        The step.
    """
    model, cache, pages = _serving_state(cfg.model, mesh, shape)
    piece = _place(mesh, (1, shape.piece), jnp.int32)
    static = steps.Static(cfg.model, shape.page_size, "sparse", keep_sets=False)
    with jax.set_mesh(mesh):
        jitted = steps.compiled().prefill
    arguments = (
        static,
        model,
        cache,
        None,
        _place(mesh, (), jnp.int32),
        piece,
        piece,
        piece,
        _place(mesh, (1, pages), jnp.int32),
        _knobs(mesh, 1, None),
        _place(mesh, (), jnp.bool),
    )
    model_flops = _extend_flops(cfg.model, shape.max_len, shape.piece)
    return PodStep(jitted, arguments, shape.piece, model_flops, shape.max_len)


def build(name: str, cfg: RunConfig, mesh: Mesh, shape: ServingShape) -> PodStep:
    """Describe a step by name.

    Args:
        name: A stage of the run, or a key of SERVING.
        cfg: The run.
        mesh: The mesh.
        shape: For prefill and decode.

    Returns:
        The step.
    """
    if name in SERVING:
        return SERVING[name](cfg, mesh, shape)
    return train_step(cfg, mesh, next(stage for stage in cfg.stages if stage == name))


def check_name(name: str, cfg: RunConfig) -> None:
    """Check that a run has a step.

    Args:
        name: The step.
        cfg: The run.

    Raises:
        UsageError: If it has none of that name; names those it has.
    """
    known = (*cfg.stages, *SERVING)
    if name not in known:
        raise UsageError(f"step {name!r} must be one of {', '.join(known)}")


SERVING: dict[str, Callable[[RunConfig, Mesh, ServingShape], PodStep]] = {
    "prefill": prefill_step,
    "decode": decode_step,
}


def _place(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *logical: str | None) -> Any:
    """Return an abstract array on the mesh."""
    where = NamedSharding(mesh, sharding.spec(*logical))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def _serving_state(cfg: ModelConfig, mesh: Mesh, shape: ServingShape) -> tuple[Any, Any, int]:
    """Return the decoder and its cache as the engine holds them, and the pages of the longest sequence."""
    model = parameters.assemble(cfg, load_model.layout(cfg, mesh, narrow=True))
    pages = -(-(shape.max_len + 1) // shape.page_size)
    config = CacheConfig(n_pages=shape.slots * pages, page_size=shape.page_size)
    cache = jax.eval_shape(lambda: caches.make_cache(cfg, config, mtp=False))
    rows = NamedSharding(mesh, sharding.spec("cache", None))
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), cache)
    return _taken_apart(model), placed, pages


def _taken_apart(model: DeepSeekV32) -> Decoder:
    """Do to shapes with places what `decoders.from_model` does to arrays."""

    def first(x: Any) -> Any:
        where = NamedSharding(x.sharding.mesh, P(*x.sharding.spec[1:]))
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=where)

    cfg = model.cfg
    dense, moe = (jax.tree.map(first, stack) for stack in (model.dense_layers, model.moe_layers))
    blocks = (dense,) * cfg.n_dense_layers + (moe,) * cfg.n_moe_layers
    embed, head = (weight.get_value() for weight in (model.embed, model.head))
    return Decoder(embed, blocks, model.norm, head, model.mtp)


def _knobs(mesh: Mesh, n: int, axis: str | None) -> Knobs:
    kinds = (jnp.float32, jnp.float32, jnp.int32, jnp.uint32)
    return Knobs(*(_place(mesh, (n,), kind, axis) for kind in kinds))


def _extend_flops(cfg: ModelConfig, max_len: int, n_new: int) -> float:
    """Count the FLOPs of the last n_new tokens of a sequence; the head runs on the last, MTP on none."""

    def without_head(n: int) -> float:
        found = flops.forward(replace(cfg, mtp=False), max(n, 1), "sparse")
        return n * (found.total - found.head)

    head = flops.forward(replace(cfg, mtp=False), 1, "sparse").head
    return without_head(max_len) - without_head(max_len - n_new) + head
