"""The evidence of a continued pre-training: held-out losses, recall of the indexer, and what they do not show."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from dsv32_jax import compiling, parameters, segments, sharding
from dsv32_jax.block import LayerStats
from dsv32_jax.config import ModelConfig
from dsv32_jax.mla import AttentionMode
from dsv32_jax.parameters import Parameters
from train import losses
from train.loop import held_out_batches
from train.losses import Batch
from train.recall import CHOICES, RecallSums, recall_probe
from train.run_config import EvidenceConfig

# What is measured: the model after which leg, under which attention. The warm-up moves only the indexers, so that
# read densely the dense and the warmed model are one; a run may have only one of them.
LOSSES: dict[str, tuple[tuple[str, ...], AttentionMode]] = {
    "dense": (("dense", "warmup"), "dense"),
    "sparse_untrained": (("dense",), "sparse"),
    "sparse_warmup": (("warmup",), "sparse"),
    "sparse": (("sparse",), "sparse"),
    "dense_control": (("dense_control",), "dense"),
    "window_control": (("window_control",), "window"),
}
# Differences a reader asks for, first minus second, as a share of the second.
GAPS = (
    ("sparse_untrained", "dense"),
    ("sparse_warmup", "dense"),
    ("sparse", "dense_control"),
    ("window_control", "dense_control"),
    ("sparse", "window_control"),
)


class RowLosses(NamedTuple):
    """Held-out cross-entropy by row, nats.

    Attributes:
        total: float64 [N], sum over the row's predicted tokens.
        tokens: float64 [N], their number.
        beyond_total: float64 [N], the sum over tokens with more than k keys, themselves included.
        beyond_tokens: float64 [N], their number.
    """

    total: np.ndarray
    tokens: np.ndarray
    beyond_total: np.ndarray
    beyond_tokens: np.ndarray


def beyond_topk(segment_ids: Int[Array, "B T"], topk: int) -> Bool[Array, "B T"]:
    """Tell which tokens predict one, and have more than topk keys to choose from, themselves included.

    Args:
        segment_ids: int32, 0 for padding.
        topk: k.

    Returns:
        The mask.
    """
    far = segments.from_ids(segment_ids).position >= topk
    return far & segments.next_is_same(segment_ids)


@functools.cache
def _loss_fn(cfg: ModelConfig, mode: AttentionMode) -> Callable[[Parameters, Batch], tuple]:
    def run(params: Parameters, batch: Batch) -> tuple:
        model = parameters.assemble(cfg, params)
        output = model(batch.tokens, batch.segment_ids, mode=mode)
        loss_BT = losses.next_token(model, output.hidden, batch)
        predicts_BT = losses.predicts(batch)
        beyond_BT = predicts_BT & beyond_topk(batch.segment_ids, cfg.indexer.topk)
        sums = (loss_BT, predicts_BT, jnp.where(beyond_BT, loss_BT, 0.0), beyond_BT)
        return sharding.replicated(tuple(jnp.sum(x, axis=1, dtype=jnp.float32) for x in sums))

    return jax.jit(run, compiler_options=compiling.compiler_options())


def row_losses(
    cfg: ModelConfig,
    params: Parameters,
    mode: AttentionMode,
    rows: dict[str, np.ndarray],
    at_once: int,
    mesh: Mesh,
) -> RowLosses:
    """Measure the next-token loss of every held-out row.

    Args:
        cfg: The model.
        params: Its arrays.
        mode: Attention.
        rows: tokens and segment ids [N, T]; of examples also which tokens train.
        at_once: Rows of a batch.
        mesh: The mesh.

    Returns:
        Sums and counts by row.
    """
    run = _loss_fn(cfg, mode)
    parts = [run(params, batch) for batch in held_out_batches(rows, at_once, mesh)]
    return RowLosses(
        *(
            np.concatenate([np.asarray(p) for p in xs]).astype(np.float64)
            for xs in zip(*parts, strict=True)
        )
    )


def mean_and_stderr(total_N: np.ndarray, count_N: np.ndarray) -> tuple[float, float]:
    """Return the mean per token and its standard error over rows.

    `mean = sum(total) / sum(count)`; the error is that of a ratio, from the rows' residuals
    `total - mean * count`: rows are the independent draws, tokens in a row are not.

    Args:
        total_N: Sums by row; a difference of two models' sums gives the paired error.
        count_N: Tokens by row.

    Returns:
        (mean, standard error).
    """
    mean = total_N.sum() / count_N.sum()
    n_rows = len(total_N)
    residual_N = total_N - mean * count_N
    spread = np.sqrt(np.sum(residual_N**2) / (n_rows - 1) * n_rows)
    return float(mean), float(spread / count_N.sum())


@functools.cache
def _recall_fn(cfg: ModelConfig) -> Callable[[Parameters, Batch], RecallSums]:
    def run(params: Parameters, batch: Batch) -> RecallSums:
        model = parameters.assemble(cfg, params)
        output = model(
            batch.tokens,
            batch.segment_ids,
            mode="dense",
            run_mtp=cfg.mtp,
            probe=recall_probe(cfg.indexer.topk),
        )
        parts = [_probed(output.dense), _probed(output.moe)]
        if output.mtp is not None:
            parts.append(jax.tree.map(lambda x: x[None], output.mtp.probe))
        layers = jax.tree.map(
            lambda *xs: jnp.concatenate(xs), *(part for part in parts if part is not None)
        )
        return sharding.replicated(layers)

    return jax.jit(run, compiler_options=compiling.compiler_options())


def _probed(stats: LayerStats | None) -> RecallSums | None:
    return None if stats is None else stats.probe


def recall_by_layer(
    cfg: ModelConfig,
    params: Parameters,
    rows: dict[str, np.ndarray],
    evidence: EvidenceConfig,
    mesh: Mesh,
) -> RecallSums:
    """Measure recall and KL in every layer, against the model's own dense attention.

    Args:
        cfg: The model.
        params: Its arrays.
        rows: tokens and segment ids [N, T].
        evidence: Rows at once.
        mesh: The mesh.

    Returns:
        Means over rows, float64 [L], the MTP layer last where there is one; `rows` and `tokens` stay counts.
    """
    run = _recall_fn(cfg)
    parts = [run(params, batch) for batch in held_out_batches(rows, evidence.rows_per_batch, mesh)]
    sums = RecallSums(
        *(
            np.sum([np.asarray(p) for p in xs], axis=0, dtype=np.float64)
            for xs in zip(*parts, strict=True)
        )
    )
    means = {name: getattr(sums, name) / sums.rows for name in CHOICES}
    return sums._replace(**means, kl=sums.kl / sums.tokens, uniform=sums.uniform / sums.tokens)


def normalised(recall: RecallSums, choice: str) -> np.ndarray:
    """Return (choice - random) / (oracle - random) by layer: 0 is a random choice, 1 a perfect one."""
    return (getattr(recall, choice) - recall.random) / (recall.oracle - recall.random)


def layer_names(cfg: ModelConfig) -> list[str]:
    """Return the layers' names as in the summary."""
    return [f"layer_{i}" for i in range(cfg.n_layers)] + (["mtp"] if cfg.mtp else [])


def loss_figures(measured: dict[str, RowLosses]) -> dict[str, float]:
    """Name the held-out losses and the paired gaps between them.

    Args:
        measured: Row losses by name, a subset of LOSSES.

    Returns:
        Flat figures: `lm_loss/<name>` in nats per token with `_stderr` over rows; `gap/<a>-<b>` as a share of b
        with the paired `_stderr`; the same gaps over tokens with more than k keys under `gap_beyond_topk/`.
    """
    figures = {}
    for name, loss in measured.items():
        mean, error = mean_and_stderr(loss.total, loss.tokens)
        figures[f"lm_loss/{name}"], figures[f"lm_loss/{name}_stderr"] = mean, error
    for first, second in GAPS:
        if first not in measured or second not in measured:
            continue
        a, b = measured[first], measured[second]
        base = b.total.sum() / b.tokens.sum()
        mean, error = mean_and_stderr(a.total - b.total, b.tokens)
        figures[f"gap/{first}-{second}"] = mean / base
        figures[f"gap/{first}-{second}_stderr"] = error / base
        base = b.beyond_total.sum() / b.beyond_tokens.sum()
        mean, error = mean_and_stderr(a.beyond_total - b.beyond_total, b.beyond_tokens)
        figures[f"gap_beyond_topk/{first}-{second}"] = mean / base
        figures[f"gap_beyond_topk/{first}-{second}_stderr"] = error / base
    if "sparse_untrained" in measured and "sparse_warmup" in measured:
        opened = figures["lm_loss/sparse_untrained"] - figures["lm_loss/dense"]
        left = figures["lm_loss/sparse_warmup"] - figures["lm_loss/dense"]
        figures["gap_closed_by_warmup"] = 1.0 - left / opened
    return figures


def recall_figures(
    cfg: ModelConfig, warmed: RecallSums | None, final: RecallSums
) -> dict[str, float]:
    """Name the recalls; means are over the main layers.

    Args:
        cfg: The model.
        warmed: After the warm-up, where that model is at hand.
        final: After the sparse stage, against that model's own dense attention.

    Returns:
        Flat figures: `recall/<choice>` and `recall/<layer>/<choice>` of the final model, with `normalised`,
        `window_normalised` and `worst_layer_normalised`; `recall_warmup/...` the same after the warm-up.
    """
    figures: dict[str, float] = {}
    for prefix, recall in (("recall", final), ("recall_warmup", warmed)):
        if recall is None:
            continue
        columns = {choice: getattr(recall, choice) for choice in CHOICES}
        columns["normalised"] = normalised(recall, "indexer")
        columns["window_normalised"] = normalised(recall, "window")
        for column, values in columns.items():
            figures |= _by_layer(cfg, prefix, column, values)
        figures[f"{prefix}/worst_layer_normalised"] = float(
            np.min(columns["normalised"][: cfg.n_layers])
        )
    return figures


def kl_figures(
    cfg: ModelConfig, untrained: RecallSums | None, warmed: RecallSums | None
) -> dict[str, float]:
    """Name the held-out KLs of the warm-up; means are over the main layers.

    Args:
        cfg: The model.
        untrained: Of the dense model with its untrained indexer, where it is at hand.
        warmed: After the warm-up, where that model is at hand.

    Returns:
        Flat figures in nats per token: `kl/first` before, `kl/last` after the warm-up, `kl/uniform` of a uniform
        guess, and `kl/<layer>/...`.
    """
    columns: dict[str, np.ndarray | jax.Array] = {}
    if untrained is not None:
        columns |= {"first": untrained.kl, "uniform": untrained.uniform}
    if warmed is not None:
        columns |= {"last": warmed.kl, "uniform": warmed.uniform}
    figures: dict[str, float] = {}
    for column, values in columns.items():
        figures |= _by_layer(cfg, "kl", column, values)
    return figures


def _by_layer(
    cfg: ModelConfig, prefix: str, column: str, values: np.ndarray | jax.Array
) -> dict[str, float]:
    """Name one figure by layer, and its mean over the main layers."""
    names = layer_names(cfg)
    figures = {f"{prefix}/{n}/{column}": float(v) for n, v in zip(names, values, strict=True)}
    figures[f"{prefix}/{column}"] = float(np.mean(values[: cfg.n_layers]))
    return figures
