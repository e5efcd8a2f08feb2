import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import segments
from dsv32_jax.indexer import IndexerTensors
from dsv32_jax.mla import AttentionTensors
from train import recall

TOPK = 4
IDS = np.array([[1] * 10 + [2] * 2, [1] * 3 + [2] * 7 + [0] * 2], np.int32)
SCALE = 0.5
ATOL = 1e-4  # float32 sums over two dozen rows


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(0)
    n_rows, seq_len = IDS.shape
    q, k = rng.normal(size=(2, n_rows, seq_len, 3, 6)).astype(np.float32)
    index_q = rng.normal(size=(n_rows, seq_len, 2, 5)).astype(np.float32)
    index_k = rng.normal(size=(n_rows, seq_len, 5)).astype(np.float32)
    index_w = rng.normal(size=(n_rows, seq_len, 2)).astype(np.float32)
    return q, k, index_q, index_k, index_w


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def loop_over_queries(tensors):
    """Measure one query and one key at a time, in float64."""
    q, k, index_q, index_k, index_w = (x.astype(float) for x in tensors)
    sums = dict.fromkeys(recall.RecallSums._fields, 0.0)
    for b, t in np.ndindex(IDS.shape):
        if not IDS[b, t]:
            continue
        keys = [s for s in range(t + 1) if IDS[b, s] == IDS[b, t]]
        heads = [
            softmax(np.array([SCALE * q[b, t, h] @ k[b, s, h] for s in keys])) for h in range(3)
        ]
        p = np.mean(heads, axis=0)
        scores = np.array([
            sum(index_w[b, t, j] * max(index_q[b, t, j] @ index_k[b, s], 0.0) for j in range(2))
            for s in keys
        ])  # fmt: skip
        sums["tokens"] += 1
        sums["kl"] += np.sum(p * (np.log(p) - np.log(softmax(scores))))
        sums["uniform"] += np.sum(p * (np.log(p) + np.log(len(keys))))
        if len(keys) > TOPK:
            sums["rows"] += 1
            sums["indexer"] += p[np.argsort(-scores, kind="stable")[:TOPK]].sum()
            sums["window"] += p[-TOPK:].sum()
            sums["oracle"] += np.sort(p)[-TOPK:].sum()
            # The mean over every set of k keys.
            sums["random"] += TOPK / len(keys)
    return sums


def test_every_figure_is_that_of_a_loop_over_queries_and_keys(tensors):
    q, k, index_q, index_k, index_w = map(jnp.asarray, tensors)
    where = segments.from_ids(jnp.asarray(IDS))
    logits = (
        np.einsum("bthd,bshd->bths", tensors[0].astype(float), tensors[1].astype(float)) * SCALE
    )
    place = np.arange(IDS.shape[1])
    visible = (place[None, :] <= place[:, None]) & (IDS[:, :, None] == IDS[:, None, :])
    visible &= IDS[:, :, None] != 0
    with np.errstate(divide="ignore"):
        lse = np.log(np.sum(np.exp(logits) * visible[:, :, None, :], axis=-1))
    laid_open = AttentionTensors(
        q, k, jnp.asarray(lse, jnp.float32), IndexerTensors(index_q, index_k, index_w), SCALE,
        where.start, where.end,
    )  # fmt: skip

    found = recall.recall_probe(TOPK)(laid_open)

    expected = loop_over_queries(tensors)
    assert found._fields == tuple(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, atol=ATOL, err_msg=name)
    # Rows with more than 4 keys: 5 to 10 of the first document, 5 to 7 of the last.
    assert (float(found.rows), float(found.tokens)) == (9, 22)
    assert found.oracle > max(found.indexer, found.window, found.random)
