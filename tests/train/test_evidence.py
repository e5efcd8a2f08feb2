import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import parameters
from train import evidence
from train.evidence import RowLosses
from train.losses import Batch
from train.recall import RecallSums


def test_the_error_of_a_mean_is_that_of_a_ratio_over_rows():
    total, count = np.array([2.0, 9.0, 4.0]), np.array([1.0, 4.0, 3.0])
    # 15 / 8 = 1.875; residuals 0.125, 1.5, -1.625; sum of squares 4.90625; / 2 rows * 3 rows, rooted, / 8 tokens.
    expected = (1.875, np.sqrt(4.90625 / 2 * 3) / 8)

    assert evidence.mean_and_stderr(total, count) == pytest.approx(expected)


def test_the_error_of_a_mean_is_what_drawing_the_rows_again_shows():
    rng = np.random.default_rng(0)
    count = rng.integers(5, 30, size=200).astype(float)
    total = count * (3 + rng.normal(size=200)) + rng.normal(size=200)
    drawn = rng.integers(0, 200, size=(4000, 200))
    means = total[drawn].sum(axis=1) / count[drawn].sum(axis=1)

    _, error = evidence.mean_and_stderr(total, count)

    assert error == pytest.approx(means.std(), rel=0.05)


def made_up(scale, beyond_scale):
    tokens, beyond = np.array([10.0, 20.0, 10.0]), np.array([4.0, 5.0, 1.0])
    level = np.array([1.0, 1.1, 0.9])
    return RowLosses(level * scale * tokens, tokens, level * beyond_scale * beyond, beyond)


@pytest.fixture
def measured():
    scales = {
        "dense": 2.0, "sparse_untrained": 3.0, "sparse_warmup": 2.25, "sparse": 1.8,
        "dense_control": 1.6, "window_control": 2.4,
    }  # fmt: skip
    return {name: made_up(scale, 2 * scale) for name, scale in scales.items()}


def test_a_gap_is_first_minus_second_as_a_share_of_the_second(measured):
    figures = evidence.loss_figures(measured)

    # Rows are alike up to a factor: mean level (10 + 22 + 9) / 40 = 1.025 and (4 + 5.5 + 0.9) / 10 = 1.04.
    assert figures["lm_loss/dense"] == pytest.approx(2.05)
    assert figures["lm_loss/sparse"] == pytest.approx(1.8 * 1.025)
    gaps = {
        "sparse_untrained-dense": 0.5, "sparse_warmup-dense": 0.125, "sparse-dense_control": 0.125,
        "window_control-dense_control": 0.5, "sparse-window_control": -0.25,
    }  # fmt: skip
    for name, gap in gaps.items():
        assert figures[f"gap/{name}"] == pytest.approx(gap), name
        assert figures[f"gap_beyond_topk/{name}"] == pytest.approx(gap), name
    assert figures["gap_closed_by_warmup"] == pytest.approx(0.75)


def test_the_error_of_a_gap_is_paired(measured):
    measured["sparse"] = measured["dense_control"]._replace(
        total=measured["dense_control"].total + 0.5 * measured["dense_control"].tokens
    )

    figures = evidence.loss_figures(measured)

    assert figures["lm_loss/sparse_stderr"] > 0.01
    assert figures["gap/sparse-dense_control"] == pytest.approx(0.5 / 1.64)
    assert figures["gap/sparse-dense_control_stderr"] == pytest.approx(0, abs=1e-12)


def test_what_was_not_measured_has_no_figure(measured):
    del measured["sparse_untrained"]

    figures = evidence.loss_figures(measured)

    assert "gap_closed_by_warmup" not in figures
    assert not [name for name in figures if "untrained" in name]


@pytest.fixture
def sums():
    third = np.array([0.9, 0.6, 0.3])  # the last is MTP's, which no mean counts
    return RecallSums(
        indexer=third, random=third / 9, window=third / 2, oracle=third * 1.0 + 0.1,
        rows=third, kl=np.array([1.0, 2.0, 9.0]), uniform=np.array([3.0, 5.0, 9.0]), tokens=third,
    )  # fmt: skip


def test_recalls_are_named_by_layer_with_their_mean_over_the_main_layers(tiny_model, sums):
    figures = evidence.recall_figures(tiny_model, None, sums)

    assert figures["recall/indexer"] == pytest.approx(0.75)
    assert figures["recall/layer_1/window"] == pytest.approx(0.3)
    assert figures["recall/mtp/oracle"] == pytest.approx(0.4)
    shares = [(0.9 - 0.1) / (1.0 - 0.1), (0.6 - 0.6 / 9) / (0.7 - 0.6 / 9)]
    assert figures["recall/normalised"] == pytest.approx(np.mean(shares))
    assert figures["recall/worst_layer_normalised"] == pytest.approx(min(shares))
    assert not [name for name in figures if name.startswith("recall_warmup")]


def test_kls_are_named_before_and_after_the_warmup(tiny_model, sums):
    before = sums._replace(kl=sums.kl * 2)

    both = evidence.kl_figures(tiny_model, before, sums)

    assert (both["kl/first"], both["kl/last"], both["kl/uniform"]) == (3.0, 1.5, 4.0)
    assert both["kl/mtp/last"] == 9.0
    assert "kl/first" not in evidence.kl_figures(tiny_model, None, sums)
    assert "kl/last" not in evidence.kl_figures(tiny_model, before, None)


def test_rows_are_measured_by_their_own_tokens(one_layer, one_layer_parameters, mesh):
    rng = np.random.default_rng(0)
    ids = np.repeat([[1, 1, 2, 2], [1, 1, 1, 0], [1, 2, 2, 2], [1] * 4], 4, axis=1).astype(np.int32)
    tokens = rng.integers(0, one_layer.vocab_size, size=ids.shape).astype(np.int32)
    params = jax.tree.map(jnp.asarray, one_layer_parameters)
    batch = Batch(jnp.asarray(tokens), jnp.asarray(ids))
    model = parameters.assemble(one_layer, params)
    output = jax.jit(lambda b: model(b.tokens, b.segment_ids, mode="window"))(batch)
    logits = np.asarray(output.hidden, float) @ one_layer_parameters.weights["head"].astype(float)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.zeros((4, 4))
    for b, t in np.ndindex(4, 15):
        if ids[b, t] and ids[b, t] == ids[b, t + 1]:
            loss = -log_p[b, t, tokens[b, t + 1]]
            beyond = int(np.sum(ids[b, : t + 1] == ids[b, t]) > one_layer.indexer.topk)
            expected[b] += (loss, 1, loss * beyond, beyond)

    found = evidence.row_losses(
        one_layer, params, "window", {"tokens": tokens, "segment_ids": ids},
        2, mesh,
    )  # fmt: skip

    np.testing.assert_allclose(np.stack(found, axis=1), expected, rtol=1e-5)
