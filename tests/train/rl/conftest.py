import dataclasses

import jax
import numpy as np
import pytest

from dsv32_jax import config, parameters
from dsv32_jax.cache import CacheConfig
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig


@pytest.fixture(scope="session")
def cfg():
    tiny = config.tiny()
    return dataclasses.replace(tiny, indexer=dataclasses.replace(tiny.indexer, topk=8))


@pytest.fixture(scope="session")
def params(cfg):
    """Weights large enough that a policy prefers some tokens."""
    rng = np.random.default_rng(0)

    def fill(name, leaf):
        one = "norm" in name and name.endswith("weight")
        return (one + 0.25 * rng.normal(size=leaf.shape)).astype(leaf.dtype)

    groups = [{n: fill(n, a) for n, a in group.items()} for group in parameters.abstract(cfg)]
    return parameters.Parameters(*jax.tree.map(jax.numpy.asarray, groups))


@pytest.fixture(scope="session")
def make_engine(cfg):
    def make(params, **changes):
        options = {"n_slots": 3, "max_len": 40, "prefill_chunk": 8, "max_waiting": 2}
        options |= {"keep_sets": True, **changes}
        cache = CacheConfig(n_pages=40, page_size=4, keep_experts=True)
        model = parameters.assemble(cfg, params)
        return Engine(model, EngineConfig(cache=cache, **options))

    return make
