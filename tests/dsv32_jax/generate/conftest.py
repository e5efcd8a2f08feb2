import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import cache
from dsv32_jax.generate import decoder
from dsv32_jax.moe import MoE


@pytest.fixture(scope="session")
def parts(model):
    return decoder.from_model(model)


@functools.partial(jax.jit, static_argnames=("cfg", "page_size", "mode"))
def extend(parts, cfg, layers, tokens, position, table, page_size, mode):
    view = cache.View(position, table, page_size)
    return decoder.extend(parts, cfg, layers, tokens, view, mode)


def spoilt(array):
    """Fill with bits that are NaN in every dtype."""
    word = jnp.asarray(-1, f"int{8 * array.dtype.itemsize}")
    return jnp.full_like(array, jax.lax.bitcast_convert_type(word, array.dtype))


class Feeder:
    """Feeds sequences piece by piece; their pages are dealt out at random, so that no two are neighbours."""

    def __init__(
        self,
        parts,
        cfg,
        *,
        n_sequences,
        max_len,
        page_size=4,
        dtype="model",
        layout="auto",
        mode="sparse",
        mtp=False,
    ):
        self.parts, self.cfg, self.mode, self.page_size = parts, cfg, mode, page_size
        n_pages = -(-max_len // page_size)
        config = cache.CacheConfig(
            n_pages=n_sequences * n_pages + 3,
            page_size=page_size,
            dtype=dtype,
            layout=layout,
            keep_experts=True,
        )
        self.cache = cache.make_cache(cfg, config, mtp=mtp)
        pages = np.random.default_rng(1).permutation(config.n_pages)[: n_sequences * n_pages]
        self.table = jnp.asarray(pages.reshape(n_sequences, n_pages), jnp.int32)
        # What an earlier owner left must not matter.
        self.cache = tuple(
            layer._replace(attended=jax.tree.map(spoilt, layer.attended)) for layer in self.cache
        )

    def view(self, position):
        return cache.View(jnp.asarray(position, jnp.int32), self.table, self.page_size)

    def feed(self, tokens, position):
        tokens = jnp.asarray(tokens, jnp.int32)
        position = jnp.asarray(position, jnp.int32)
        hidden, self.cache = extend(
            self.parts,
            self.cfg,
            self.cache,
            tokens,
            position,
            self.table,
            self.page_size,
            self.mode,
        )
        return np.asarray(hidden)


@pytest.fixture(scope="session")
def feeder():
    return Feeder


@pytest.fixture
def routed(model, monkeypatch):
    """Return the experts of every token in the one expert layer, as one pass over a text routes them."""
    call = MoE.__call__

    def route(tokens):
        seen = []

        def record(layer, x, documents, experts):
            out, routing = call(layer, x, documents, experts)
            jax.debug.callback(lambda experts: seen.append(np.asarray(experts)), routing.experts)
            return out, routing

        with monkeypatch.context() as patched:
            patched.setattr(MoE, "__call__", record)
            jax.jit(lambda m: m(jnp.asarray(tokens)).hidden)(model).block_until_ready()
            jax.effects_barrier()
        (experts,) = seen
        return experts

    return route
