import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from dsv32_jax import sharding
from train import pod_steps, stage, traced
from train import state as states
from train.config_file import load_config
from train.losses import Batch
from train.optimizer import Rates, make_optimizer
from train.rl import learner
from train.step import make_step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v32_671b_warmup", "v32_671b_sparse"])
def test_the_released_models_step_traces_at_128k_tokens(name):
    cfg = load_config(name)
    last = cfg.stages[-1]
    settings, data = cfg.stage_config(last), cfg.stage_data(last)
    adam = settings.optimizer.adam
    state = states.abstract(cfg.model, make_optimizer(adam), last)
    tokens = jax.ShapeDtypeStruct((data.batch_size, data.seq_len), jnp.int32)
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    step = make_step(cfg.model, settings.loss, adam, last, settings.microbatches)

    after, metrics = jax.eval_shape(step, state, Batch(tokens, tokens), Rates(rate, rate))

    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
    assert metrics.loss.shape == ()


@pytest.mark.parametrize("name", ["v32_671b_grpo", "v32_671b_speciale"])
def test_the_update_of_a_minibatch_of_the_released_models_responses_traces(name):
    """As `trainer.Learner` makes it, sharded over 512 devices, each row holding one response of full length."""
    cfg = load_config(name)
    settings, rollouts = cfg.rl.learner, cfg.rl.rollouts
    sizes = {"expert": cfg.mesh.ici_expert, "context": 512 // cfg.mesh.ici_expert}
    mesh = AbstractMesh(
        tuple(sizes.get(axis, 1) for axis in sharding.AXES),
        sharding.AXES,
        axis_types=(AxisType.Auto,) * len(sharding.AXES),
    )
    cfg.check_mesh(mesh)
    n_responses = rollouts.prompts * rollouts.group_size // settings.minibatches
    shape = pod_steps.GrpoShape(
        rows=n_responses, row_length=settings.row_length, microbatches=n_responses // settings.rows,
        responses=1, response_tokens=rollouts.max_tokens, kept_tokens=4 * settings.row_length,
    )  # fmt: skip
    adam = settings.optimizer.adam
    with jax.sharding.use_abstract_mesh(mesh):
        step = learner.make_step(
            cfg.model, settings.objective, adam,
            replay=settings.keep_routing, kept=settings.keep_sampling_mask,
        )  # fmt: skip
        arguments = pod_steps.grpo_arguments(cfg.model, adam, settings.stage, mesh, shape)
        trace = step.trace(*arguments)

    state, sums, norms = trace.out_info
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), arguments[0]
    )
    assert sums.loss.shape == norms.whole.shape == ()
    assert arguments[0].parameters.weights["moe_layers.moe.w1"].sharding.spec[1] == "expert"
    least = shape.rows * shape.row_length * stage.train_flops(cfg.model, shape.row_length, "rl")
    assert traced.executed_flops(trace.jaxpr, 512) > least
