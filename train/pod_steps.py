"""The real steps of a run with abstract arguments: shapes with places, from which they are traced and compiled."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
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
from train.head import Kept
from train.losses import Batch
from train.optimizer import AdamConfig, Rates, make_optimizer
from train.rl import learner, packing
from train.rl.learner import Targets, Work
from train.rl.objective import ObjectiveConfig
from train.rl.packing import Packed
from train.run_config import RunConfig, check_model_on_mesh, check_row_length, check_rows
from train.stage import MAIN_TRAINS, Stage, train_flops
from train.step import make_step
from train.step_estimate import Load

GRPO = "grpo"
# Its numbers change nothing but numbers.
OBJECTIVE = ObjectiveConfig(kl_strength=1e-3, off_policy_delta=1.0)


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


@dataclass(frozen=True, kw_only=True)
class GrpoShape:
    """What GRPO's update is compiled for.

    Attributes:
        rows: Rows of packed rollouts in a step.
        row_length: Tokens of a row.
        microbatches: Parts the rows are worked on in.
        responses: Rollouts of a row.
        response_tokens: Tokens of the longest response.
        kept_tokens: Entries of a row's kept sets, of all its places together; 0 where nothing was cut.
    """

    rows: int = 512
    row_length: int = 32_768
    microbatches: int = 8
    responses: int = 4
    response_tokens: int = 8192
    kept_tokens: int = 0

    def __post_init__(self) -> None:
        """Check ranges."""
        for field in fields(self):
            value, least = getattr(self, field.name), int(field.name != "kept_tokens")
            require(value >= least, f"{field.name}={value} must be at least {least}")
        require(
            self.rows % self.microbatches == 0,
            f"microbatches={self.microbatches} must divide the {self.rows} rows of GRPO's step",
        )
        require(
            self.response_tokens < self.row_length,
            f"response_tokens={self.response_tokens} must be below row_length={self.row_length}",
        )

    def load(self, cfg: RunConfig) -> Load:
        """Describe the step to the estimate.

        Args:
            cfg: The run, whose model and AdamW are taken.

        Returns:
            The load.

        Raises:
            UsageError: If no stage of the run trains the main model.
        """
        stages = [stage for stage in cfg.stages if stage in MAIN_TRAINS]
        if not stages:
            raise UsageError(
                f"{GRPO} takes AdamW's settings from a stage that trains the main model: the run has none"
            )
        return Load(
            name=GRPO,
            stage="rl",
            rows=self.rows,
            seq_len=self.row_length,
            document=self.row_length // self.responses,
            microbatches=self.microbatches,
            adam=cfg.stage_config(stages[-1]).optimizer.adam,
            reference=True,
        )


class Shapes(NamedTuple):
    """What is asked for of steps that are no stage of the run.

    Attributes:
        serving: Of prefill and decode.
        grpo: Of GRPO's update.
    """

    serving: ServingShape = ServingShape()
    grpo: GrpoShape = GrpoShape()


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
        reach: See `traced.executed_flops`.
    """

    jitted: Any
    arguments: tuple[Any, ...]
    tokens: int
    model_flops: float
    seq_len: int
    n_stacked: int = 0
    gradient_bytes: float = 0.0
    reach: float = 1.0


def reach(load: Load, mesh: Mesh) -> float:
    """Return the share of a row's keys that its queries read on average, on the device that has the row's end.

    Args:
        load: The step, its rows full of documents.
        mesh: Cuts a row's queries.
    """
    piece = load.seq_len / math.prod(mesh.shape[axis] for axis in sharding.RULES["sequence"])
    keys = load.document / 2 if load.document <= piece else load.document - piece / 2
    return keys / load.seq_len


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
    state = _state(cfg.model, settings.optimizer.adam, stage, mesh)
    tokens = _place(mesh, (data.batch_size, data.seq_len), jnp.int32, "batch", "sequence")
    rate = _place(mesh, (), jnp.float32)
    with jax.set_mesh(mesh):
        step = make_step(
            cfg.model, settings.loss, settings.optimizer.adam, stage, settings.microbatches
        )
    n_tokens, load = data.batch_size * data.seq_len, step_estimate.load_of(cfg, stage)
    return PodStep(
        step,
        (state, Batch(tokens, tokens), Rates(rate, rate)),
        n_tokens,
        n_tokens * train_flops(cfg.model, data.seq_len, stage),
        data.seq_len,
        cfg.model.n_moe_layers,
        step_estimate.gradient_bytes(cfg.model, load, mesh),
        reach(load, mesh),
    )


def grpo_step(cfg: RunConfig, mesh: Mesh, shape: GrpoShape) -> PodStep:
    """Describe GRPO's update: microbatches scored by the reference, gradients of the policy added up, AdamW.

    Experts are replayed. The state and the reference are float32, as in a run.

    Args:
        cfg: The run, whose model learns, with the AdamW of its last stage that trains the main model.
        mesh: The mesh.
        shape: Rollouts.

    Returns:
        The step.
    """
    load, model = shape.load(cfg), cfg.model
    arguments = grpo_arguments(model, load.adam, load.stage, mesh, shape)
    with jax.set_mesh(mesh):
        step = learner.make_step(model, OBJECTIVE, load.adam, kept=shape.kept_tokens > 0)
    of_token = train_flops(replace(model, mtp=False), load.document, load.stage)
    of_token += flops.forward(replace(model, mtp=False), load.document, "sparse").total
    return PodStep(
        step,
        arguments,
        load.tokens,
        load.tokens * of_token,
        shape.row_length,
        model.n_moe_layers,
        step_estimate.gradient_bytes(model, load, mesh),
        reach(load, mesh),
    )


def grpo_arguments(
    model: ModelConfig, adam: AdamConfig, stage: Stage, mesh: Mesh | AbstractMesh, shape: GrpoShape
) -> tuple[Any, ...]:
    """Return what `learner.make_step`'s function takes, with a reference, as shapes with places.

    Args:
        model: The policy.
        adam: Of its moments.
        stage: "rl" or "rl_indexer".
        mesh: The mesh.
        shape: Rollouts.

    Returns:
        (state, reference, work, rates).
    """
    state = _state(model, adam, stage, mesh)
    work = _grpo_work(model, mesh, shape)
    rate = _place(mesh, (), jnp.float32)
    return state, state.parameters, work, Rates(rate, rate)


def _grpo_work(model: ModelConfig, mesh: Mesh | AbstractMesh, shape: GrpoShape) -> Work:
    """Return stacked microbatches as `trainer.Learner` lays them out."""
    parts, rows = shape.microbatches, shape.rows // shape.microbatches
    token = (parts, rows, shape.row_length)
    response = (parts, rows, packing.round_up(shape.responses))
    drawn = (*response, packing.round_up(shape.response_tokens))
    entries: Any = ((parts, rows, packing.round_up(shape.kept_tokens or 1)), jnp.int32)
    sizes: dict[str, Any] = {
        "tokens": (token, jnp.int32),
        "segment_ids": (token, jnp.int32),
        "temperature": (token, jnp.float32),
        "kept": Kept(entries, entries) if shape.kept_tokens else None,
        "experts": ((parts, model.n_moe_layers, *token[1:], model.moe.n_active), jnp.int32),
        "place": (drawn, jnp.int32),
        "mask": (drawn, jnp.bool),
        "log_p": (drawn, jnp.float32),
        "rollout": (response, jnp.int32),
    }
    where = packing.axes(Packed(**sizes))
    packed = jax.tree.map(
        lambda logical, size: _place(mesh, *size, *logical),
        where, Packed(**sizes), is_leaf=lambda x: type(x) is tuple,
    )  # fmt: skip
    number = _place(mesh, response, jnp.float32, *where.rollout)
    targets = Targets(packed.log_p, None, number, number, number)
    return Work(packed, targets, _place(mesh, (), jnp.int32))


def _state(model: ModelConfig, adam: AdamConfig, stage: Stage, mesh: Mesh | AbstractMesh) -> Any:
    """Return the abstract training state, on its devices."""
    optimizer = make_optimizer(adam)
    return states.on_devices(
        states.abstract(model, optimizer, stage), states.shardings(model, optimizer, stage, mesh)
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


def build(name: str, cfg: RunConfig, mesh: Mesh, shapes: Shapes) -> PodStep:
    """Describe a step by name.

    Args:
        name: A stage of the run, GRPO, or a key of SERVING.
        cfg: The run.
        mesh: The mesh.
        shapes: For what is no stage.

    Returns:
        The step.
    """
    if name == GRPO:
        return grpo_step(cfg, mesh, shapes.grpo)
    if name in SERVING:
        return SERVING[name](cfg, mesh, shapes.serving)
    return train_step(cfg, mesh, next(stage for stage in cfg.stages if stage == name))


def check_name(name: str, cfg: RunConfig) -> None:
    """Check that a run has a step.

    Args:
        name: The step.
        cfg: The run.

    Raises:
        UsageError: If it has none of that name; names those it has.
    """
    known = (*cfg.stages, GRPO, *SERVING)
    if name not in known:
        raise UsageError(f"step {name!r} must be one of {', '.join(known)}")


def load_of(name: str, cfg: RunConfig, shapes: Shapes) -> Load:
    """Describe a step that trains to the estimate.

    Args:
        name: A stage of the run, or GRPO.
        cfg: The run.
        shapes: For GRPO.

    Returns:
        The load.

    Raises:
        UsageError: If the step does not train.
    """
    if name == GRPO:
        return shapes.grpo.load(cfg)
    for stage in cfg.stages:
        if stage == name:
            return step_estimate.load_of(cfg, stage)
    raise UsageError(
        f"--search ranks meshes for {', '.join((*cfg.stages, GRPO))}, and not for {name}"
    )


def check_mesh(cfg: RunConfig, load: Load, mesh: Mesh) -> None:
    """Check that a mesh divides the model and the rows of a step.

    Args:
        cfg: The run.
        load: Of one of its steps.
        mesh: The mesh.

    Raises:
        ValueError: If an axis does not divide a size; names both.
    """
    check_model_on_mesh(cfg.model, mesh)
    rows = load.rows // load.microbatches
    check_rows(mesh, rows, f"{load.name} rows / microbatches")
    check_row_length(mesh, load.seq_len, f"{load.name} tokens of a row")


SERVING: dict[str, Callable[[RunConfig, Mesh, ServingShape], PodStep]] = {
    "prefill": prefill_step,
    "decode": decode_step,
}


def _place(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], dtype: Any, *logical: str | None
) -> Any:
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
