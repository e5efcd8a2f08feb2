"""Choose each source's rows of one split, and interleave the sources by weight."""

from collections.abc import Sequence

import grain
import numpy as np

from train.data import config, hashing, packing
from train.data import corpus as corpora


def check_vocab(opened: Sequence[corpora.Corpus], vocab_size: int) -> None:
    """Check that a model's embedding has a row for every id that may come.

    Args:
        opened: the corpora.
        vocab_size: the model's vocabulary size.

    Raises:
        ValueError: some id is at or above `vocab_size`.
    """
    for corpus in opened:
        if corpus.n_ids > vocab_size:
            raise ValueError(
                f"vocabulary too small: vocab_size={vocab_size}, but source"
                f" {corpus.source.path!r} has token ids up to {corpus.n_ids - 1}"
            )


def split_rows(
    opened: Sequence[corpora.Corpus],
    cfg: config.DataConfig,
    *,
    split: config.Split,
    seed: int | None,
) -> list[packing.Rows]:
    """Cut each source's documents of one split into rows.

    Args:
        opened: one corpus a source.
        cfg: `seq_len`, `examples`, `pack` and `heldout_fraction` are read.
        split: the side of the split.
        seed: orders the documents before they are cut; None keeps the order of the files.

    Returns:
        the rows of each source, at least one each.

    Raises:
        ValueError: a source has no document on this side, or an example is longer than a row.
    """
    packed = packing.WholeRows if cfg.examples else packing.PackedRows
    rows_class = packed if cfg.pack else packing.DocumentRows
    rows: list[packing.Rows] = []
    for corpus in opened:
        if isinstance(corpus, corpora.ExampleCorpus):
            _check_lengths(corpus, cfg.seq_len)
        order = hashing.split_documents(
            corpus.keys, heldout_fraction=cfg.heldout_fraction, split=split
        )
        if seed is not None:
            order = hashing.shuffle_documents(order, keys=corpus.keys, seed=seed)
        rows.append(rows_class(corpus, order=order, seq_len=cfg.seq_len))
        if not len(rows[-1]):
            raise ValueError(
                f"the {split} split of source {corpus.source.path!r} is empty:"
                f" {len(corpus.keys)} documents, heldout_fraction={cfg.heldout_fraction}; change"
                " the fraction, or give the source more documents"
            )
    return rows


def _check_lengths(corpus: corpora.ExampleCorpus, seq_len: int) -> None:
    """Refuse examples that a row would cut."""
    too_long = np.flatnonzero(corpus.lengths > seq_len)
    if len(too_long):
        first = too_long[0]
        raise ValueError(
            f"{corpus.names[first]}: {corpus.lengths[first]} tokens, more than seq_len={seq_len}, and"
            f" examples are never cut ({len(too_long)} of {len(corpus.lengths)} are too long);"
            " raise seq_len, or leave them out"
        )


def mix(
    rows: Sequence[packing.Rows], weights: Sequence[float], *, seed: int | None, repeat: bool
) -> grain.MapDataset:
    """Interleave rows of several sources by weight.

    Any stretch of n rows has n * weight / sum(weights) of a source, to within a row or so: the
    sources take turns, nothing is drawn by chance.

    Args:
        rows: the rows of each source.
        weights: each source's share, positive.
        seed: orders each source's rows, anew each epoch; None keeps their order.
        repeat: each source starts over when it ends; if not, the mixture ends where some source
            would.

    Returns:
        the mixture, any row at hand.
    """
    datasets = []
    for source in rows:
        dataset = grain.MapDataset.source(source)
        if seed is not None:
            # Takes microseconds a row, but milliseconds for sources of a few dozen rows or fewer.
            dataset = dataset.shuffle(seed=seed)
        datasets.append(dataset.repeat() if repeat else dataset)
    return grain.MapDataset.mix(datasets, weights=list(weights))
