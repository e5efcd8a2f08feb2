import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import expert_rows

FLOAT32_TOL = 2e-5  # two products over ~20 values, gated sums of size ~1
N, D, F, E, A = 40, 6, 5, 8, 3

run_experts = jax.jit(expert_rows.run_experts)


def silu(x):
    return x / (1 + np.exp(-x))


def loop_over_tokens(x, experts, gates, w1, w3, w2, held=range(E)):
    """Apply every token's experts one by one in float64."""
    out = np.zeros(x.shape)
    for n in range(len(x)):
        for expert, weight in zip(experts[n], gates[n], strict=True):
            if expert in held:
                hidden = silu(x[n] @ w1[expert]) * (x[n] @ w3[expert])
                out[n] += weight * (hidden @ w2[expert])
    return out


@pytest.fixture
def weights(rng):
    return [rng.normal(size=shape) for shape in ((E, D, F), (E, D, F), (E, F, D))]


def float32(*arrays):
    return tuple(jnp.asarray(a, jnp.float32) for a in arrays)


def draw_choices(rng, kind):
    if kind == "even":
        return np.stack([rng.permutation(E)[:A] for _ in range(N)])
    if kind == "one expert":  # heavy imbalance: everything lands on expert 5
        return np.full((N, 1), 5)
    return np.stack([[7, 0, n % 2 + 3] for n in range(N)])  # experts 1, 2, 5, 6 get nothing


@pytest.mark.parametrize("kind", ["even", "one expert", "some idle"])
def test_no_token_is_dropped_however_uneven_the_load(rng, weights, kind):
    experts = draw_choices(rng, kind)
    x, gates = rng.normal(size=(N, D)), rng.uniform(size=experts.shape)

    out = run_experts(*float32(x), jnp.asarray(experts), *float32(gates), float32(*weights))

    assert out.dtype == jnp.float32
    np.testing.assert_allclose(
        out, loop_over_tokens(x, experts, gates, *weights), atol=FLOAT32_TOL * 10
    )


def test_experts_held_elsewhere_add_nothing(rng, weights):
    experts = draw_choices(rng, "even")
    x, gates = rng.normal(size=(N, D)), rng.uniform(size=experts.shape)
    for first in (0, 2, 6):
        held = range(first, first + 2)
        local = [w[first : first + 2] for w in weights]
        out = run_experts(
            *float32(x), jnp.asarray(experts), *float32(gates), float32(*local), first
        )
        expected = loop_over_tokens(x, experts, gates, *weights, held=held)
        np.testing.assert_allclose(out, expected, atol=FLOAT32_TOL * 10)


@pytest.mark.parametrize(("n_tokens", "first"), [(1, 0), (2, 0), (1, 2)])
def test_fewer_choices_than_experts_read_their_own_weights(
    rng, weights, n_tokens, first, monkeypatch
):
    monkeypatch.setattr(expert_rows, "plan_dispatch", None)  # the sorted form is not used
    experts = draw_choices(rng, "even")[:n_tokens]
    x, gates = rng.normal(size=(n_tokens, D)), rng.uniform(size=experts.shape)
    local = float32(*[w[first:] for w in weights])
    out = expert_rows.run_experts(*float32(x), jnp.asarray(experts), *float32(gates), local, first)
    expected = loop_over_tokens(x, experts, gates, *weights, held=range(first, E))
    np.testing.assert_allclose(out, expected, atol=FLOAT32_TOL * 10)


@pytest.mark.parametrize("kind", ["even", "one expert"])
def test_gradients_equal_those_of_a_sum_over_all_experts(rng, weights, kind):
    experts = draw_choices(rng, kind)
    d_out = rng.normal(size=(N, D))

    def loss(x, gates, weights):
        return jnp.sum(run_experts(x, jnp.asarray(experts), gates, weights) * d_out)

    def plain_loss(x, gates, weights):
        w1, w3, w2 = weights
        share = jnp.einsum("na,nae->ne", gates, jax.nn.one_hot(experts, E))
        hidden = jax.nn.silu(jnp.einsum("nd,edf->nef", x, w1)) * jnp.einsum("nd,edf->nef", x, w3)
        return jnp.einsum("ne,nef,efd,nd->", share, hidden, w2, d_out)

    arguments = (
        *float32(rng.normal(size=(N, D)), rng.uniform(size=experts.shape)),
        float32(*weights),
    )
    got, expected = (jax.jit(jax.grad(f, (0, 1, 2)))(*arguments) for f in (loss, plain_loss))

    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=FLOAT32_TOL * max(10.0, np.abs(b).max()))


@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize("first", [0, 2])
def test_the_plan_gives_every_local_choice_its_own_row_in_its_experts_blocks(rng, block, first):
    n_local = 4
    experts = np.stack([rng.permutation(E)[:A] for _ in range(13)])

    plan = expert_rows.plan_dispatch(jnp.asarray(experts), n_local, first, block)

    token, choice, row, sizes = (np.asarray(a) for a in plan)
    ends = np.cumsum(sizes)
    local = (experts >= first) & (experts < first + n_local)
    assert len(token) % block == 0
    assert np.all(sizes % block == 0)
    assert ends[-1] <= len(token)
    assert np.all(row[~local] == len(token))
    assert len(set(row[local])) == local.sum()
    np.testing.assert_array_equal(token[row[local]], np.nonzero(local)[0])
    np.testing.assert_array_equal(
        np.searchsorted(ends, row[local], "right"), experts[local] - first
    )
    assert np.sum(token < 13) == local.sum()
    np.testing.assert_array_equal(choice[row[local]], np.flatnonzero(local))
    assert np.sum(choice < experts.size) == local.sum()


def test_the_rows_suffice_for_the_worst_imbalance():
    experts = jnp.full((64, 2), 3, jnp.int32).at[:, 1].set(jnp.arange(64) % 3)
    plan = expert_rows.plan_dispatch(experts, 8, 0, 8)
    assert np.all(np.asarray(plan.row) < len(plan.token))
    assert np.sum(np.asarray(plan.token) < 64) == 128


def test_a_bound_on_the_local_choices_saves_rows_and_changes_nothing_else(rng):
    experts = np.full((64, A), -1)  # as of rows to which no token came
    experts[7:20] = [rng.permutation(E)[:A] for _ in range(13)]

    whole = expert_rows.plan_dispatch(jnp.asarray(experts), E, 0, 4)
    bounded = expert_rows.plan_dispatch(jnp.asarray(experts), E, 0, 4, most=13 * A)

    assert (
        len(bounded.token) == 40 + E * 4
    )  # 39 choices in whole blocks, and a block for each expert
    np.testing.assert_array_equal(bounded.token, whole.token[: len(bounded.token)])
    np.testing.assert_array_equal(bounded.row[7:20], whole.row[7:20])
    assert np.all(np.asarray(bounded.row)[:7] == len(bounded.token))


def test_gates_may_stand_before_the_last_product(rng, weights):
    x, gates = float32(rng.normal(size=(32, D)), rng.uniform(size=32))
    sizes = jnp.full(E, 4, jnp.int32)
    plain, gated = (
        expert_rows.multiply_rows(x, float32(*weights), sizes, 4, None, g) for g in (None, gates)
    )
    np.testing.assert_allclose(gated, gates[:, None] * plain, atol=FLOAT32_TOL * 10)
