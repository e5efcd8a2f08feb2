"""Run by test_sharded_engine.py in a process of its own with 8 devices: what a mesh draws, and what one device does.

Reads a list of meshes as JSON; prints for each a line of JSON with the tokens of both, the keys they selected, and the
spread of the cache.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from dsv32_jax import config, parameters, sharding
from dsv32_jax.cache import CacheConfig
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig, TokenEvent
from dsv32_jax.generate.sampling import SamplingParams

ENGINE = EngineConfig(
    n_slots=4, max_len=32, cache=CacheConfig(n_pages=32, page_size=4, keep_selection=True)
)


def complete(cfg, arrays, mesh, speculative, chunk):
    """Return the tokens and selections of three requests, and over how many devices the cache lies."""
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, parameters.shardings(cfg, mesh))
        model = parameters.assemble(cfg, placed)
        changed = dataclasses.replace(ENGINE, speculative=speculative, prefill_chunk=chunk)
        engine = Engine(model, changed)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, cfg.vocab_size, size=n).tolist() for n in (3, 17, 10)]
        numbers = [
            engine.submit(prompt, SamplingParams(max_tokens=8, seed=i))
            for i, prompt in enumerate(prompts)
        ]
        tokens, selections = {number: [] for number in numbers}, dict.fromkeys(numbers)
        for event in engine.run():
            if isinstance(event, TokenEvent):
                tokens[event.request].append(event.token)
            else:
                selections[event.request] = event.selection.tolist()
        shard = engine._cache[0].attended.latent.addressable_shards[0].data
        found = {"tokens": list(tokens.values()), "selections": list(selections.values())}
        return found, engine._cache[0].attended.latent.size // shard.size


def main():
    tiny = config.tiny()
    cfg = dataclasses.replace(tiny, vocab_size=96, n_layers=2)
    rng = np.random.default_rng(1)
    arrays = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32), parameters.abstract(cfg)
    )
    one = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    for sizes, speculative, chunk in json.loads(sys.argv[1]):
        mesh_cfg = sharding.MeshConfig(
            **{"ici_fsdp": 1} | {f"ici_{a}": n for a, n in sizes.items()}
        )
        mesh = sharding.make_mesh(mesh_cfg, jax.devices()[: int(np.prod(list(sizes.values())))])
        found, spread = complete(cfg, arrays, mesh, speculative, chunk)
        expected, _ = complete(cfg, arrays, one, speculative, chunk)
        line = json.dumps({"found": found, "expected": expected, "spread": spread})
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
