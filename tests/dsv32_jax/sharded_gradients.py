"""Run by test_sharding.py in a process of its own with 8 devices: print how far a mesh's gradients are off.

`python sharded_gradients.py '[["sparse", {"tensor": 2}], ...]'` prints one JSON object a case: the largest relative
error over gradients and loss sums against one device, and the largest difference in an expert's load. Further words:
"untyped" runs it as around GPU kernels, without types of varying axes; "travel" sends tokens to their experts by
all-to-all; "pieces" does either in pieces of the sequence, and "rounds" with little room at the receivers.
"""

import dataclasses
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dsv32_jax import config, expert_travel, moe, parameters, sharding
from train import step
from train.losses import Batch

ROWS, LENGTH = 4, 16
STAGES = {"sparse": "sparse", "gathered": "sparse", "warmup": "warmup", "dense": "dense"}


def model_config(case, dispatch):
    """Return an expert layer and MTP, with heads and widths that every mesh divides."""
    tiny = config.tiny()
    mla = dataclasses.replace(tiny.mla, masked_max_len=0 if case == "gathered" else 8192)
    indexer = dataclasses.replace(tiny.indexer, n_heads=4, topk=5)
    return dataclasses.replace(
        tiny,
        vocab_size=96,
        n_layers=1,
        n_dense_layers=0,
        mla=mla,
        indexer=indexer,
        expert_dispatch=dispatch,
    )


def draw_batch():
    """Draw packed rows with padding at an end, at the start and in the middle."""
    ids = np.ones((ROWS, LENGTH), np.int32)
    ids[0, 7:], ids[1, 13:], ids[2, :5], ids[3, 4:6] = 2, 0, 0, 0
    tokens = np.random.default_rng(0).integers(0, 96, size=ids.shape)
    return Batch(jnp.asarray(tokens, jnp.int32), jnp.asarray(ids))


def run(case, sizes, dispatch="auto"):
    """Return the gradients, loss sums and loads of a stage under a mesh."""
    cfg = model_config(case, dispatch)
    mesh_cfg = sharding.MeshConfig(**{"ici_fsdp": 1} | {f"ici_{a}": n for a, n in sizes.items()})
    mesh = sharding.make_mesh(mesh_cfg, jax.devices()[: math.prod(sizes.values())])
    with jax.set_mesh(mesh):
        params = jax.device_put(draw_parameters(cfg), parameters.shardings(cfg, mesh))
        layout = NamedSharding(mesh, sharding.spec("batch", "sequence"))
        batch = jax.device_put(draw_batch(), layout)
        grads = jax.jit(
            lambda params, batch: step.gradients(
                cfg, step.LossConfig(), STAGES[case], params, batch, 1
            )
        )
        return jax.tree.map(lambda a: np.asarray(a, np.float64), grads(params, batch))


def draw_parameters(cfg):
    """Draw every array by numpy, norms around 1, the router bias too."""
    rng = np.random.default_rng(1)

    def fill(name, leaf):
        one = "norm" in name and name.endswith("weight")
        return jnp.asarray(one + 0.1 * rng.normal(size=leaf.shape), leaf.dtype)

    groups = ({n: fill(n, a) for n, a in group.items()} for group in parameters.abstract(cfg))
    return parameters.Parameters(*groups)


def compare(got, expected):
    """Return the worst relative error by name, and the worst difference of a load."""
    (grads, sums, loads), (base_grads, base_sums, base_loads) = got, expected
    pairs = {name: (grads[name], base_grads[name]) for name in base_grads}
    pairs |= {
        f"sum {name}": (getattr(sums, name), getattr(base_sums, name)) for name in sums._fields
    }
    errors = {
        name: float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))
        if np.any(b)
        else float(np.max(np.abs(a)))
        for name, (a, b) in pairs.items()
    }
    worst = max(errors, key=errors.__getitem__)
    load = max(float(np.max(np.abs(loads[name] - base_loads[name]))) for name in base_loads)
    return {"worst": worst, "error": errors[worst], "load": load, "n": len(grads)}


def main():
    """Compare every case of the command line with one device."""
    jax.config.update("jax_disable_most_optimizations", True)
    expected = {}
    checked = sharding.types_checked
    for case, sizes, *words in json.loads(sys.argv[1]):
        stage = STAGES[case]
        if stage not in expected:
            expected[stage] = run(stage, {"data": 1})  # "gathered" must equal "sparse" too
        sharding.types_checked = (lambda: False) if "untyped" in words else checked
        moe.MAX_ROWS = 16 if "pieces" in words else 2**17
        expert_travel.SLACK = 0.2 if "rounds" in words else 1.5
        dispatch = "all_to_all" if "travel" in words else "auto"
        result = compare(run(case, sizes, dispatch), expected[stage])
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
