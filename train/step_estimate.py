"""What an optimizer step needs on a mesh, by counting and without compiling: memory, and the roofline's three times.

Arguments are exact. The rest counts what the program is known to keep and to move, in passes over its large arrays; how
many passes is read off compiled steps of the released model, so the estimate ranks meshes and compiling decides.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from dsv32_jax import expert_travel, flops, mla, moe, parameters, sharding
from dsv32_jax.config import ModelConfig
from train import collectives
from train import state as states
from train.optimizer import AdamConfig, make_optimizer
from train.roofline import Roofline
from train.run_config import RunConfig
from train.stage import INDEXER_TRAINS, MAIN_TRAINS, Stage, train_flops
from train.topology import Chip

# From the compiled steps in docs/pods.md (jax 0.11.2, libtpu 0.0.48.1).
LIVE_ROWS = 7  # arrays of a piece's rows of experts that are alive together
# Over those rows in memory, where the main model trains, and where it only runs and runs again.
ROW_PASSES = {True: 56, False: 16}
# The same where tokens are sent to their experts.
SENT_ROW_PASSES = {True: 109, False: 31}
LOSS_PASSES = 35  # over a query's keys in float32, by the indexer's loss on kernels
GATHER_PASSES = 22  # over a query's selected keys, on kernels, which are given them gathered
SCORE_PASSES = 25  # over one head's scores, by the definitions
INDEX_PASSES = 10  # over one index head's, by the definitions
WARMUP_SCORE_PASSES = 40  # where every key is attended to and the indexer's loss reads them again
WEIGHT_BYTES = (
    24  # read and written for each gathered weight: gathered, used three times, its gradient
)
PIECE_BYTES = 16  # more for an expert's, in each piece of the tokens
# Products executed over those asked for: a forward pass more, and by the definitions keys after the query.
EXECUTED = {("sparse", True): 1.2, ("sparse", False): 1.75, ("dense", True): 1.35, ("dense", False): 1.75,
            ("warmup", True): 2.5, ("warmup", False): 4.3,
            ("rl", True): 1.2, ("rl", False): 1.75}  # fmt: skip
FORWARD_SHARE = (
    0.25  # of a microbatch's traffic: a forward pass of forward, forward again and backward
)


class Load(NamedTuple):
    """An optimizer step, as the estimate sees it.

    Attributes:
        name: Of the step.
        stage: What trains.
        rows: Of the batch.
        seq_len: Tokens of a row.
        document: Tokens of one of a row's documents.
        microbatches: Parts of the batch.
        adam: The optimizer.
        reference: Whether another model, the reference, scores the batch too.
    """

    name: str
    stage: Stage
    rows: int
    seq_len: int
    document: int
    microbatches: int
    adam: AdamConfig
    reference: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.seq_len


def load_of(cfg: RunConfig, stage: Stage) -> Load:
    """Describe a stage's step.

    Args:
        cfg: The run.
        stage: One of its stages.

    Returns:
        The load.
    """
    settings, data = cfg.stage_config(stage), cfg.stage_data(stage)
    return Load(
        name=stage,
        stage=stage,
        rows=data.batch_size,
        seq_len=data.seq_len,
        document=data.seq_len,
        microbatches=settings.microbatches,
        adam=settings.optimizer.adam,
    )


class Estimate(NamedTuple):
    """One step on one mesh. Bytes and seconds are of one device.

    Attributes:
        arguments_bytes: Parameters and optimizer state.
        gradient_bytes: Gradients of what trains, twice where microbatches are added up.
        peak_bytes: The most that is alive at once.
        times: The roofline.
    """

    arguments_bytes: float
    gradient_bytes: float
    peak_bytes: float
    times: Roofline


class _Work(NamedTuple):
    """What a device has to do in one microbatch.

    Attributes:
        rows: Rows of the batch.
        tokens: Tokens.
        keys: Keys that a query is scored against.
        seq_len: Tokens of a row.
        heads, index_heads: Of a token.
        on_kernels: Whether attention runs on kernels.
        expert: Size of the expert axis.
        sends: Whether tokens are sent to their experts, and not gathered.
        expert_rows: Rows allotted to them, over a microbatch's tokens.
        pieces: Parts that the experts' tokens are worked on in.
    """

    rows: int
    tokens: int
    keys: int
    seq_len: int
    heads: float
    index_heads: float
    on_kernels: bool
    expert: int
    sends: bool
    expert_rows: float
    pieces: int


class _Weights(NamedTuple):
    """Elements that a device gathers.

    Attributes:
        plain: Of everything but routed experts, in one pass through the model.
        experts: Of the routed experts it works for.
        layer_plain, layer_experts: Of the largest layer.
    """

    plain: float
    experts: float
    layer_plain: float
    layer_experts: float


def gradient_bytes(model: ModelConfig, load: Load, mesh: Mesh) -> float:
    """Return the bytes of a step's gradients on one device; twice where microbatches are added up.

    Args:
        model: The model.
        load: The step.
        mesh: The mesh.

    Returns:
        Bytes.
    """
    sizes = _shard_sizes(model, mesh)
    moving = sum(size for name, size in sizes.items() if states.trains(load.stage, name))
    return 4.0 * moving * (2 if load.microbatches > 1 else 1)


def estimate(model: ModelConfig, load: Load, mesh: Mesh, chip: Chip) -> Estimate:
    """Estimate an optimizer step.

    Args:
        model: The model; the mesh divides what it cuts.
        load: The step.
        mesh: Of devices with coordinates.
        chip: What one can do.

    Returns:
        The estimate.
    """
    sizes, stage = _shard_sizes(model, mesh), load.stage
    moving = sum(size for name, size in sizes.items() if states.trains(stage, name))
    arguments = 4.0 * sum(sizes.values()) + moving * _moment_bytes(load.adam)
    gradients = gradient_bytes(model, load, mesh)
    # The compiler casts weights that do not change once, before the layers.
    fixed = 2.0 * (sum(sizes.values()) - moving)
    if load.reference:
        arguments += 4.0 * sum(sizes.values())
    runs = replace(model, mtp=model.mtp and stage != "rl")  # what of the model the step runs
    work, weights = _work(runs, load, mesh), _gathered(runs, mesh)
    of_token = EXECUTED[stage, work.on_kernels] * train_flops(runs, load.document, stage)
    traffic, links = (
        _traffic(runs, stage, work, weights),
        _links_s(runs, stage, work, weights, mesh, chip),
    )
    if load.reference:  # runs forward, once
        of_token += flops.forward(runs, load.document, "sparse").total
        traffic += _traffic(runs, stage, work, weights) * FORWARD_SHARE
        links += _links_s(runs, stage, work, weights, mesh, chip) * FORWARD_SHARE
    executed = of_token * load.tokens / mesh.size
    traffic = 2 * arguments + 3 * gradients + load.microbatches * traffic
    links = load.microbatches * (links + _copies_s(load, gradients, mesh, chip))
    times = Roofline(executed / chip.flops, traffic / chip.hbm_bytes_per_s, links)
    peak = arguments + gradients + fixed + _alive(runs, stage, work, weights)
    return Estimate(arguments, gradients, peak, times)


def _work(model: ModelConfig, load: Load, mesh: Mesh) -> _Work:
    shape = mesh.shape
    rows = load.rows // load.microbatches // math.prod(shape[a] for a in sharding.BATCH_AXES)
    tokens = rows * load.seq_len // shape["context"]
    sparse = load.stage in ("sparse", "rl")
    gathers = sparse and load.seq_len > mla.masked_up_to(model.mla, "tpu")
    choices = tokens * model.moe.n_active
    sends = model.expert_dispatch != "all_gather" and (
        model.expert_dispatch != "auto" or not moe.why_gather(model, choices, shape["expert"])
    )
    n_rows = choices * (min(expert_travel.SLACK, shape["expert"]) if sends else shape["expert"])
    return _Work(
        rows=rows,
        tokens=tokens,
        keys=min(model.indexer.topk, load.seq_len) if gathers else load.seq_len,
        seq_len=load.seq_len,
        heads=model.mla.n_heads / shape["tensor"],
        index_heads=model.indexer.n_heads / shape["tensor"],
        on_kernels=model.kernels != "reference",
        expert=shape["expert"],
        sends=sends,
        expert_rows=n_rows,
        pieces=1 << max(math.ceil(math.log2(n_rows / moe.MAX_ROWS)), 0),
    )


def _alive(model: ModelConfig, stage: Stage, work: _Work, weights: _Weights) -> float:
    """Return the bytes of saved layer inputs, and of the largest layer's own arrays, beside the gradients."""
    streams = 4.0 * work.tokens * model.dim * (model.n_layers + model.mtp)
    n_rows = work.expert_rows / work.pieces
    trains = stage in MAIN_TRAINS
    # In bfloat16, and the gradients in float32.
    experts = 2.0 * n_rows * model.dim * (LIVE_ROWS if trains else 2)
    experts += weights.layer_experts * (6 if trains else 2)
    return streams + max(experts, _attention_bytes(model, stage, work)) + 6 * weights.layer_plain


def _attention_bytes(model: ModelConfig, stage: Stage, work: _Work) -> float:
    """Queries, keys and values of one layer, and in training their gradients, in bfloat16."""
    dims, copies = model.mla, 3 if stage in MAIN_TRAINS else 1
    if work.keys < work.seq_len:  # absorbed, one key of all heads
        return 2.0 * copies * work.tokens * work.heads * (2 * dims.kv_lora_rank + dims.rope_dim)
    each = work.rows * work.seq_len + work.tokens
    return 2.0 * copies * each * work.heads * (dims.qk_dim + dims.v_dim)


def _traffic(model: ModelConfig, stage: Stage, work: _Work, weights: _Weights) -> float:
    """Return the bytes that a microbatch moves in device memory."""
    passes = (SENT_ROW_PASSES if work.sends else ROW_PASSES)[stage in MAIN_TRAINS]
    n_layers, n_moe = model.n_layers + model.mtp, model.n_moe_layers + model.mtp
    total = n_moe * passes * 2.0 * work.expert_rows * model.dim
    total += (
        WEIGHT_BYTES * weights.plain + (WEIGHT_BYTES + PIECE_BYTES * work.pieces) * weights.experts
    )
    if not work.on_kernels:
        passes = WARMUP_SCORE_PASSES if stage == "warmup" else SCORE_PASSES
        scores = passes * work.heads * work.keys
        if stage in INDEXER_TRAINS:
            scores += INDEX_PASSES * work.index_heads * work.seq_len
        total += 4.0 * n_layers * work.tokens * scores
    elif work.keys < work.seq_len:
        width = model.mla.kv_lora_rank + model.mla.rope_dim
        total += 2.0 * GATHER_PASSES * n_layers * work.tokens * work.keys * width
    elif stage in INDEXER_TRAINS:
        total += 4.0 * LOSS_PASSES * n_layers * work.tokens * work.keys
    return total


def _links_s(
    model: ModelConfig, stage: Stage, work: _Work, weights: _Weights, mesh: Mesh, chip: Chip
) -> float:
    """Return the seconds of a microbatch's collectives, one after the other."""
    rates: dict[tuple[str, tuple[str, ...]], float] = {}
    total = 0.0
    for kind, axes, size in _collectives(model, stage, work, weights):
        if (kind, axes) not in rates:
            rates[kind, axes] = _seconds(kind, axes, 2**30, mesh, chip) / 2**30
        total += size * rates[kind, axes]
    return total


def _copies_s(load: Load, gradients: float, mesh: Mesh, chip: Chip) -> float:
    """Return the seconds in which the model's copies add up the gradients of a microbatch."""
    once = round(gradients / (2 if load.microbatches > 1 else 1))
    return _seconds("all-reduce", ("data",), once, mesh, chip)


def _seconds(kind: str, axes: tuple[str, ...], size: int, mesh: Mesh, chip: Chip) -> float:
    devices = list(mesh.devices.flat)
    return collectives.seconds(kind, size, _group(mesh, axes), devices, chip)


def _collectives(
    model: ModelConfig, stage: Stage, work: _Work, weights: _Weights
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """List (kind, mesh axes, bytes) of one microbatch: a layer runs forward, again, and backward."""
    trains = stage in MAIN_TRAINS
    plain, experts = sharding.RULES["embed"], sharding.RULES["expert_embed"]
    yield "all-gather", plain, 2 * 2 * weights.plain
    yield "all-gather", experts, 2 * 2 * weights.experts
    n_layers, n_moe = model.n_layers + model.mtp, model.n_moe_layers + model.mtp
    runs = 3 if trains else 2  # a piece of the experts' tokens runs once more
    tokens = work.tokens * model.dim * (1 if work.sends else work.expert)
    yield "all-reduce", ("tensor",), 4.0 * runs * n_moe * tokens
    if work.sends:  # rows there and back; in the backward pass cotangents too
        there = expert_travel.reach(model.moe, work.expert)
        rows = runs * (there + model.moe.n_active) + (2 * there + model.moe.n_active) * trains
        yield "ragged-all-to-all", ("expert",), 2.0 * n_moe * tokens * rows
    else:
        yield "all-gather", ("expert",), 2.0 * runs * n_moe * tokens
        yield "reduce-scatter", ("expert",), 4.0 * runs * n_moe * tokens
        if trains:
            yield "all-gather", ("expert",), 4.0 * n_moe * tokens
            yield "reduce-scatter", ("expert",), 2.0 * n_moe * tokens
    yield "all-reduce", ("tensor",), 2.0 * 3 * 2 * n_layers * work.tokens * model.dim
    dims = model.mla
    width = work.heads * (dims.qk_dim + dims.v_dim)
    if work.keys < work.seq_len:
        width = dims.kv_lora_rank + dims.rope_dim
    width += model.indexer.head_dim
    yield "all-gather", ("context",), 2.0 * 2 * n_layers * work.rows * work.seq_len * width
    if trains:
        yield "reduce-scatter", plain, 4 * weights.plain
        yield "reduce-scatter", experts, 4 * weights.experts
        yield "reduce-scatter", ("context",), 2.0 * n_layers * work.rows * work.seq_len * width


def _group(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the places of the devices along some axes at the origin of the others."""
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    at = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    return tuple(int(place) for place in places[at].flat)


def _shard_sizes(model: ModelConfig, mesh: Mesh) -> dict[str, int]:
    """Return the elements of each weight that a device holds."""
    shapes = parameters.abstract(model).weights
    where = parameters.shardings(model, mesh).weights
    return {n: math.prod(where[n].shard_shape(x.shape)) for n, x in shapes.items()}


def _moment_bytes(adam: AdamConfig) -> float:
    """Return the bytes of optimizer state for each element that trains."""
    optimizer = make_optimizer(adam)
    leaf = jax.ShapeDtypeStruct((1024,), np.float32)
    state = jax.eval_shape(optimizer.init, {"head": leaf, "layers.indexer.wk": leaf})
    moments = [x for x in jax.tree.leaves(state) if x.ndim]
    return sum(x.size * x.dtype.itemsize for x in moments) / (2 * leaf.size)


def _gathered(model: ModelConfig, mesh: Mesh) -> _Weights:
    """Count what a device needs whole: of each weight what the axes leave that are gathered for a product."""
    shapes = parameters.abstract(model).weights
    where: Any = parameters.shardings(model, mesh).weights
    sums, largest = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    by_layer: dict[str, float] = {}
    for name, shape in shapes.items():
        if name == "embed":  # looked up where it lies
            continue
        routed = ".moe.w" in name
        gathered = sharding.RULES["expert_embed" if routed else "embed"]
        cut = [axis for entry in where[name].spec for axis in _axes(entry) if axis not in gathered]
        size = shape.size / math.prod(mesh.shape[axis] for axis in cut)
        sums[routed] += size
        stack = next((s for s in parameters.STACKS if name.startswith(s)), None)
        if stack:
            key = f"{routed} {stack}"
            by_layer[key] = by_layer.get(key, 0.0) + size / shape.shape[0]
            largest[routed] = max(largest[routed], by_layer[key])
    return _Weights(sums[False], sums[True], largest[False], largest[True])


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
