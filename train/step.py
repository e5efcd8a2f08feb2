"""One optimizer step: microbatches, gradients of what trains, router bias, update."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsv32_jax import compiling, parameters, sharding
from dsv32_jax.config import ModelConfig, require
from dsv32_jax.model import ModelOutput
from dsv32_jax.parameters import Arrays, Parameters
from train import losses
from train.losses import Batch, LossSums, LossWeights
from train.optimizer import AdamConfig, Rates, apply_updates, group_norm, make_optimizer
from train.stage import ATTENTION, INDEXER_TRAINS, MAIN_TRAINS, Stage
from train.state import TrainState, trainable


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Coefficients of the losses; None turns one off, a zero is an error.

    Attributes:
        mtp: lambda of the multi-token prediction; None leaves the MTP module as it is outside the warm-up; unused
            where the model has none.
        balance: alpha of the sequence-wise balance loss.
        bias_rate: gamma, the step of the router bias.
        kl: Factor on the indexer's KL, a mean over tokens summed over layers.
    """

    mtp: float | None = 0.3
    balance: float | None = 1e-4
    bias_rate: float | None = 1e-3
    kl: float = 1.0

    def __post_init__(self) -> None:
        """Check that nothing is silently off."""
        for name in ("mtp", "balance", "bias_rate", "kl"):
            value = getattr(self, name)
            require(
                value is None or value > 0,
                f"{name}={value} must be positive"
                + ("" if name == "kl" else ", or None to turn it off"),
            )


class StepMetrics(NamedTuple):
    """What a step reports, float32 scalars.

    Attributes:
        loss: What was minimised.
        lm: Mean next-token cross-entropy, nats per token.
        mtp: Mean MTP cross-entropy.
        balance: Mean balance loss before alpha, summed over expert layers.
        kl: Mean indexer KL per token, summed over layers.
        grad_norm: Norm of the main model's gradient before clipping; 0 where it does not train.
        indexer_grad_norm: The same of the indexers.
        max_load: Tokens of the fullest expert of any layer over the mean.
        max_device_load: The same of the fullest device of the expert axis, all its choices together, over the whole
            batch: what limits the step, but for how uneven parts of the batch are. 1 where one device has all experts.
    """

    loss: Float[Array, ""]
    lm: Float[Array, ""]
    mtp: Float[Array, ""]
    balance: Float[Array, ""]
    kl: Float[Array, ""]
    grad_norm: Float[Array, ""]
    indexer_grad_norm: Float[Array, ""]
    max_load: Float[Array, ""]
    max_device_load: Float[Array, ""]


def combine(sums: LossSums, weights: LossWeights, cfg: LossConfig, stage: Stage) -> Array:
    """Weigh the losses of a stage.

    Args:
        sums: Of a (micro)batch.
        weights: Of the whole batch.
        cfg: Coefficients.
        stage: The stage.

    Returns:
        float32 []; summed over the microbatches it is the batch's loss.
    """
    total = jnp.zeros((), jnp.float32)
    if stage in MAIN_TRAINS:
        total += sums.lm / weights.lm
        total += (cfg.mtp or 0.0) * sums.mtp / weights.mtp
        total += (cfg.balance or 0.0) * sums.balance / weights.balance
    if stage in INDEXER_TRAINS:
        total += cfg.kl * sums.kl / weights.kl
    return total


def expert_loads(output: ModelOutput) -> Arrays:
    """Return tokens per expert, by the name of the router bias they move."""
    loads = {}
    if output.moe is not None:
        loads["moe_layers.moe.gate.bias"] = output.moe.load
    if output.mtp is not None:
        loads["mtp.block.moe.gate.bias"] = output.mtp.load
    return loads


def gradients(
    cfg: ModelConfig,
    loss_cfg: LossConfig,
    stage: Stage,
    params: Parameters,
    batch: Batch,
    microbatches: int,
) -> tuple[Arrays, LossSums, Arrays]:
    """Return the gradient of the batch's loss with respect to what trains, accumulated in float32.

    Args:
        cfg: The model.
        loss_cfg: Coefficients.
        stage: The stage.
        params: The model's arrays.
        batch: The whole batch; its rows are split into consecutive microbatches.
        microbatches: How many; divides the rows.

    Returns:
        (gradients by name, loss sums of the batch, tokens per expert by router-bias name).
    """
    weights = losses.weights(batch)
    run_mtp = _runs_mtp(cfg, loss_cfg, stage)

    def loss_fn(moving: Arrays, micro: Batch) -> tuple[Array, tuple[LossSums, Arrays]]:
        model = parameters.assemble(cfg, params._replace(weights=params.weights | moving))
        output = model(
            micro.tokens,
            micro.segment_ids,
            mode=ATTENTION[stage],
            run_mtp=run_mtp,
            indexer_loss=stage in INDEXER_TRAINS,
        )
        sums = losses.sums(model, output, micro, heads=stage in MAIN_TRAINS)
        return combine(sums, weights, loss_cfg, stage), (sums, expert_loads(output))

    grad_fn = jax.grad(loss_fn, has_aux=True)
    moving = trainable(stage, params.weights)
    if microbatches == 1:
        grads, (sums, loads) = grad_fn(moving, batch)
        return grads, sums, loads

    def split(x: Array) -> Array:
        parts = x.reshape(microbatches, -1, *x.shape[1:])
        return sharding.constrain(parts, None, "batch", "sequence")

    def add(total: tuple, micro: Batch) -> tuple[tuple, None]:
        grads, (sums, loads) = grad_fn(moving, micro)
        return jax.tree.map(jnp.add, total, (grads, sums, loads)), None

    micros = jax.tree.map(split, batch)
    shapes = jax.eval_shape(grad_fn, moving, jax.tree.map(lambda x: x[0], micros))
    grads, (sums, loads) = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(add, (grads, sums, loads), micros)[0]


def _runs_mtp(cfg: ModelConfig, loss_cfg: LossConfig, stage: Stage) -> bool:
    return cfg.mtp and (stage == "warmup" or loss_cfg.mtp is not None)


@functools.cache
def make_step(
    cfg: ModelConfig,
    loss_cfg: LossConfig,
    adam: AdamConfig,
    stage: Stage,
    microbatches: int,
) -> Callable[[TrainState, Batch, Rates], tuple[TrainState, StepMetrics]]:
    """Build the jitted function of one optimizer step; the state is donated.

    Args:
        cfg: The model.
        loss_cfg: Coefficients.
        adam: The optimizer; its learning rates are an argument of the step.
        stage: The stage.
        microbatches: Parts the batch is worked on in.

    Returns:
        step(state, batch, rates) -> (state, metrics). Equal arguments return the same function, compiled once.
    """
    optimizer = make_optimizer(adam)

    def step(state: TrainState, batch: Batch, rates: Rates) -> tuple[TrainState, StepMetrics]:
        params = state.parameters
        grads, sums, loads = gradients(cfg, loss_cfg, stage, params, batch, microbatches)
        moving = trainable(stage, params.weights)
        updates, opt_state = optimizer.update(grads, state.opt_state, moving)
        moved = apply_updates(moving, updates, rates)
        if not _runs_mtp(cfg, loss_cfg, stage):
            # MTP has no gradient then, and weight decay alone would shrink it.
            moved = {name: value for name, value in moved.items() if not name.startswith("mtp.")}
        new_weights = params.weights | moved
        bias = params.router_bias
        if stage in MAIN_TRAINS and loss_cfg.bias_rate is not None:
            bias = bias | parameters.load_balance_step(
                {name: bias[name] for name in loads}, loads, loss_cfg.bias_rate
            )
        weights = losses.weights(batch)
        metrics = StepMetrics(
            loss=combine(sums, weights, loss_cfg, stage),
            lm=sums.lm / weights.lm,
            mtp=sums.mtp / weights.mtp,
            balance=sums.balance / weights.balance,
            kl=sums.kl / weights.kl,
            grad_norm=group_norm(grads, "main"),
            indexer_grad_norm=group_norm(grads, "indexer"),
            max_load=_max_load(loads, cfg.moe.n_experts),
            max_device_load=_max_load(loads, sharding.axis_size("expert")),
        )
        return TrainState(Parameters(new_weights, bias), opt_state, state.step + 1), metrics

    return jax.jit(step, donate_argnums=0, compiler_options=compiling.compiler_options())


def _max_load(loads: Arrays, n_parts: int) -> Array:
    """Return the fullest of equal parts of the experts over the mean of its layer, the worst layer's."""
    worst = []
    for load in loads.values():
        parts = jnp.sum(load.reshape(*load.shape[:-1], n_parts, -1), axis=-1)
        worst.append(jnp.max(parts / jnp.maximum(jnp.mean(parts, -1, keepdims=True), 1.0)))
    return jnp.max(jnp.stack(worst)) if worst else jnp.ones(())
