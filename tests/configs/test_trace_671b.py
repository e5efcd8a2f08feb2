import jax
import jax.numpy as jnp
import pytest

from train import state as states
from train.config_file import load_config
from train.losses import Batch
from train.optimizer import Rates, make_optimizer
from train.step import make_step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v32_671b_warmup", "v32_671b_sparse"])
def test_the_released_models_step_traces_at_128k_tokens(name):
    cfg = load_config(name)
    stage = cfg.stages[-1]
    settings, data = cfg.stage_config(stage), cfg.stage_data(stage)
    adam = settings.optimizer.adam
    state = states.abstract(cfg.model, make_optimizer(adam), stage)
    tokens = jax.ShapeDtypeStruct((data.batch_size, data.seq_len), jnp.int32)
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    step = make_step(cfg.model, settings.loss, adam, stage, settings.microbatches)

    after, metrics = jax.eval_shape(step, state, Batch(tokens, tokens), Rates(rate, rate))

    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
    assert metrics.loss.shape == ()
