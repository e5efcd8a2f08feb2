"""Run by test_expert_travel.py in a process of its own with 8 devices: experts on a mesh against one device.

`python travelling_experts.py '[{"kind": "even", ...}, ...]'` prints one JSON object a case: the largest differences
from one device of the outputs and of each gradient, over the largest value; how many rounds it took; what travelled.
"""

import functools
import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dsv32_jax import config, expert_rows, expert_travel, gate, sharding

N, D, F, E, A = 24, 16, 8, 16, 4  # N tokens a device, unless a case says otherwise


def experts_of(n_experts, kind):
    n_groups = 8 if kind == "groups" else 1
    return config.MoEConfig(
        n_experts=n_experts, n_active=A, n_groups=n_groups, n_active_groups=min(2, n_groups), expert_dim=F
    )  # fmt: skip


def draw_choices(kind, n_tokens, n_experts):
    rng = np.random.default_rng(3)
    scores = jnp.asarray(rng.uniform(size=(1, n_tokens, n_experts)), jnp.float32)
    if kind == "nowhere":  # the first device has tokens of its own and no expert that anybody chose
        scores = scores.at[..., : n_experts // 2].set(-1)
    if kind == "one device":  # every token chooses the first A experts
        return jnp.broadcast_to(jnp.arange(A), (n_tokens, A))
    if kind == "one sender":  # only the last device's tokens go to the first experts
        late = jnp.arange(n_tokens)[:, None] >= n_tokens - N
        return jnp.where(late, jnp.arange(A), n_experts - 1 - jnp.arange(A))
    return gate.select_experts(scores, experts_of(n_experts, kind))[0]


def by_definition(rows, into, start, length, place, arriving, *, axis_name):
    """Do what jax.lax.ragged_all_to_all documents, from everybody's arguments."""
    everyone = jax.lax.all_gather((rows, start, length, place), axis_name)
    rows, start, length, place = everyone
    me = jax.lax.axis_index(axis_name)
    ok = jnp.all(length[:, me] == arriving)
    for sender in range(length.shape[0]):
        row = jnp.arange(into.shape[0]) - place[sender, me]
        inside = (row >= 0) & (row < length[sender, me])
        sent = rows[sender][jnp.clip(start[sender, me] + row, 0, rows.shape[1] - 1)]
        inside = jnp.expand_dims(inside & ok, range(1, into.ndim))
        into = jnp.where(inside, sent, into)
    return into


def one_device(x, experts, gates, weights):
    return expert_rows.run_experts(x, experts, gates, weights)


def on_the_mesh(x, experts, gates, weights, sizes):
    token, weight = P("expert"), P("expert")

    def local(x, experts, gates, weights):
        x, experts, gates, *weights = sharding.vary((x, experts, gates, *weights), "experts")
        out = expert_travel.run_travelling(x, experts, gates, weights, sizes)
        plan = expert_travel.plan_travel(experts, sizes)
        rows = jnp.sum(plan.round >= 0)[None]  # sent by this device
        others = tuple(axis for axis in sharding.AXES if axis != "expert")  # of one device each
        return *jax.lax.psum((out, rows), others), plan.n_rounds

    specs = (token, token, token, (weight,) * 3)
    return sharding.shard_map(local, specs, (token, token, P()))(x, experts, gates, weights)


def run(case):
    """Return a case's numbers."""
    n_devices, dtype = case.get("devices", 8), jnp.dtype(case.get("dtype", "float32"))
    expert_travel.SLACK = case.get("slack", 1.5)
    if jax.default_backend() == "cpu":
        jax.lax.ragged_all_to_all = by_definition
    rng = np.random.default_rng(0)
    n_tokens, n_experts = case.get("tokens", N) * n_devices, case.get("experts", E)
    experts = draw_choices(case["kind"], n_tokens, n_experts)
    x, d_out = (jnp.asarray(rng.normal(size=(n_tokens, D)), dtype) for _ in range(2))
    gates = jnp.asarray(rng.uniform(0.1, 1, size=experts.shape), jnp.float32)
    shapes = ((n_experts, D, F), (n_experts, D, F), (n_experts, F, D))
    weights = tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    n_local, ragged = n_experts // n_devices, case.get("ragged", False)
    reach = expert_travel.reach(experts_of(n_experts, case["kind"]), n_devices)
    sizes = expert_travel.Sizes(n_devices, n_local, reach, ragged)

    mesh = sharding.make_mesh(
        sharding.MeshConfig(ici_fsdp=1, ici_expert=n_devices), jax.devices()[:n_devices]
    )

    def both(f):
        def loss(x, gates, weights):
            out, *rest = f(x, experts, gates, weights)
            return jnp.sum(out * d_out.astype(jnp.float32)), (out, *rest)

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, gates, weights)

    expected, (out,) = both(lambda *a: (one_device(*a),))
    with jax.set_mesh(mesh):
        got, (travelled, rows, n_rounds) = both(functools.partial(on_the_mesh, sizes=sizes))
    names = ("x", "gates", "w1", "w3", "w2")
    pairs = dict(
        zip(names, zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True), strict=True)
    )
    pairs["out"] = (travelled, out)
    errors = {
        name: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for name, (a, b) in pairs.items()
    }
    devices = np.asarray(experts) // n_local
    return errors | {
        "digest": hashlib.sha256(
            b"".join(np.asarray(a).tobytes() for a, _ in pairs.values())
        ).hexdigest(),
        "rounds": int(n_rounds),
        "rows": int(np.sum(np.asarray(rows))),
        "places": sum(
            len(set(row)) for row in devices.tolist()
        ),  # (token, device with an expert of it)
        "most": max(len(set(row)) for row in devices.tolist()),
        "reach": reach,
    }


def main():
    """Run every case of the command line."""
    for case in json.loads(sys.argv[1]):
        sys.stdout.write(json.dumps(run(case)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
