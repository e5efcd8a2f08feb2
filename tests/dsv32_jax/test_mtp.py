import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv32_jax import mtp


@pytest.fixture
def module(cfg):
    return mtp.MTP(cfg, rngs=nnx.Rngs(0))


@pytest.fixture
def inputs(cfg, rng):
    return [jnp.asarray(rng.normal(size=(1, 6, cfg.dim)), jnp.float32) for _ in range(3)]


run = jax.jit(
    lambda module, hidden, embed, ids: module(hidden, embed, ids, mode="sparse", indexer_loss=True)
)


@pytest.mark.parametrize("half", ["embedding", "hidden"])
def test_the_embedding_half_comes_first(cfg, module, inputs, half):
    hidden, embed, other = inputs
    ids = jnp.ones((1, 6), jnp.int32)
    weight = module.eh_proj[...]
    rows = slice(cfg.dim, None) if half == "embedding" else slice(None, cfg.dim)
    module.eh_proj = nnx.Param(weight.at[rows].set(0.0))  # only one half is read

    base, _ = run(module, hidden, embed, ids)
    new_embed, _ = run(module, hidden, other, ids)
    new_hidden, _ = run(module, other, embed, ids)

    kept, moved = (new_hidden, new_embed) if half == "embedding" else (new_embed, new_hidden)
    np.testing.assert_array_equal(kept, base)
    assert np.all(np.any(np.asarray(moved) != np.asarray(base), axis=-1))


@pytest.mark.parametrize("which", ["enorm", "hnorm"])
def test_each_half_has_its_own_norm(module, inputs, which):
    hidden, embed, _ = inputs
    ids = jnp.ones((1, 6), jnp.int32)
    base, _ = run(module, hidden, embed, ids)

    # A norm forgets the scale of its input.
    scaled = (hidden, 7 * embed) if which == "enorm" else (7 * hidden, embed)
    np.testing.assert_allclose(run(module, *scaled, ids)[0], base, atol=1e-4)

    getattr(module, which).weight = nnx.Param(2 * jnp.ones(hidden.shape[-1]))
    assert np.any(np.abs(np.asarray(run(module, hidden, embed, ids)[0] - base)) > 1e-3)


def test_the_last_token_of_a_document_counts_as_padding(cfg, module, inputs):
    hidden, embed, other = inputs
    ids = jnp.asarray([[1, 1, 1, 2, 2, 0]])
    changed = embed.at[:, [2, 4, 5]].set(other[:, [2, 4, 5]])

    (base, stats), (out, new_stats) = (run(module, hidden, e, ids) for e in (embed, changed))

    np.testing.assert_array_equal(out[:, [0, 1, 3]], base[:, [0, 1, 3]])
    assert jnp.sum(stats.load) == 3 * cfg.moe.n_active
    for a, b in zip(jax.tree.leaves(stats), jax.tree.leaves(new_stats), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
