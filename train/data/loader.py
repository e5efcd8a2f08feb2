"""Serve batches to each host, resumable at any step under any number of hosts.

The global batch of step s is rows [s * B, (s + 1) * B) of an endless mixture whose row i is a pure
function of the configuration and i. So the position is the step alone: the hosts agree without
talking, and a state saved by one of eight hosts restores on a single one.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Shaped

from train.data import config, mixture, packing
from train.data import corpus as corpora

logger = logging.getLogger(__name__)

Batch = dict[str, Shaped[np.ndarray, "B T"]]

HELDOUT_SEED = 0  # fixed, so that runs of different seeds are measured on the same rows
MAX_THREADS = 16  # grain's own default


class HostBatches:
    """One host's part of every global batch: a random-access source for grain.

    Args:
        rows: the endless mixture.
        batch_size: rows of a global batch.
        host: this host's number.
        n_hosts: number of hosts; host h takes the h-th of as many equal parts.
    """

    def __init__(self, rows: grain.MapDataset, *, batch_size: int, host: int, n_hosts: int):
        """Keep the rows; the class docstring has the arguments."""
        self._rows = rows
        self._batch_size = batch_size
        self._size = batch_size // n_hosts
        self._first = host * self._size

    def __len__(self) -> int:
        """Return the number of steps, too many to reach."""
        return len(self._rows) // self._batch_size

    def __getitem__(self, step: int) -> Batch:
        """Return this host's part of the batch of a step.

        Args:
            step: the step, from 0.

        Returns:
            tokens and segment ids, int32 [batch_size / n_hosts, seq_len].
        """
        start = step * self._batch_size + self._first
        return _stack([self._rows[i] for i in range(start, start + self._size)])


class Loader(Iterator[Batch]):
    """Iterate over one host's batches, forever.

    Args:
        rows: the rows of each source.
        cfg: the configuration.
        host: this host's number.
        n_hosts: number of hosts.
        split: the side of the split that `rows` come from.

    Attributes:
        n_rows: rows in one pass over every source, over all hosts. With several sources no
            moment ends such a pass: each starts over at its own pace.
        n_tokens_per_epoch: tokens in these rows, padding not counted.
    """

    def __init__(
        self,
        rows: Sequence[packing.Rows],
        cfg: config.DataConfig,
        *,
        host: int,
        n_hosts: int,
        split: config.Split,
    ):
        """Set the position to step 0; the class docstring has the arguments."""
        self.n_rows = sum(map(len, rows))
        self.n_tokens_per_epoch = sum(source.n_tokens for source in rows)
        self._identity = _identity(rows, cfg, split)
        seed = cfg.seed if cfg.shuffle else None
        weights = [source.weight for source in cfg.sources]
        batches = HostBatches(
            mixture.mix(rows, weights, seed=seed, repeat=True),
            batch_size=cfg.batch_size,
            host=host,
            n_hosts=n_hosts,
        )
        options = grain.ReadOptions(
            num_threads=min(cfg.prefetch, MAX_THREADS), prefetch_buffer_size=cfg.prefetch
        )
        self._batches = iter(grain.MapDataset.source(batches).to_iter_dataset(options))
        self._step = 0

    def __next__(self) -> Batch:
        """Return the next batch.

        Returns:
            tokens and segment ids, int32 [batch_size / n_hosts, seq_len].
        """
        batch = next(self._batches)
        self._step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Return the position, the same on every host.

        Returns:
            what JSON can hold: the step whose batch comes next, and what the data are, so that
            they can be recognised.
        """
        return {"step": self._step, "data": self._identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a saved position, whatever the host counts then and now.

        Args:
            state: what `state` returned.

        Raises:
            ValueError: not a loader's state, or saved from other data.
        """
        step, data = state.get("step"), state.get("data")
        if not isinstance(step, int) or step < 0 or not isinstance(data, dict):
            raise ValueError(f"not a data loader's state: {state!r}")
        for key, ours in self._identity.items():
            if data.get(key) != ours:
                raise ValueError(
                    f"the state was saved from other data: {key} was {data.get(key)!r}, is {ours!r}"
                )
        grain.experimental.set_next_index(self._batches, step)
        self._step = step


def make_loader(
    cfg: config.DataConfig,
    *,
    host: int,
    n_hosts: int,
    split: config.Split,
    vocab_size: int,
    opened: Sequence[corpora.Corpus] | None = None,
) -> Loader:
    """Make one host's loader.

    Args:
        cfg: the configuration, the same on every host.
        host: this host's number, in [0, n_hosts).
        n_hosts: number of hosts; divides `cfg.batch_size`.
        split: "train" or "heldout".
        vocab_size: the model's vocabulary size; no token id reaches it.
        opened: what `corpus.open_corpora(cfg)` returned, to tokenise once for several loaders;
            None opens the sources.

    Returns:
        the loader, at step 0.

    Raises:
        FileNotFoundError: a source or the tokenizer does not exist.
        ValueError: a value above breaks its rule, a file is broken, or the split is empty.
    """
    if n_hosts < 1 or not 0 <= host < n_hosts:
        raise ValueError(f"host={host} must be in [0, n_hosts={n_hosts})")
    if cfg.batch_size % n_hosts:
        raise ValueError(f"batch_size={cfg.batch_size} must be a multiple of n_hosts={n_hosts}")
    opened = corpora.open_corpora(cfg) if opened is None else opened
    mixture.check_vocab(opened, vocab_size)
    seed = cfg.seed if cfg.shuffle else None
    rows = mixture.split_rows(opened, cfg, split=split, seed=seed)
    if host == 0:
        for source, its_rows in zip(cfg.sources, rows, strict=True):
            logger.info(
                "%s split of %s: %d documents, %d tokens, %d rows of %d",
                *(split, source.path, len(its_rows.order), its_rows.n_tokens),
                *(len(its_rows), cfg.seq_len),
            )
    return Loader(rows, cfg, host=host, n_hosts=n_hosts, split=split)


def heldout_rows(
    cfg: config.DataConfig,
    n_rows: int,
    *,
    vocab_size: int,
    opened: Sequence[corpora.Corpus] | None = None,
) -> Batch:
    """Return held-out rows to evaluate on, the same for every seed, batch size and host count.

    Sources mix by weight, and no row comes twice.

    Args:
        cfg: the configuration.
        n_rows: number of rows, at least 1.
        vocab_size: the model's vocabulary size; no token id reaches it.
        opened: what `corpus.open_corpora(cfg)` returned; None opens the sources.

    Returns:
        tokens and segment ids, int32 [n_rows, seq_len].

    Raises:
        FileNotFoundError: a source or the tokenizer does not exist.
        ValueError: a file is broken, or the held-out split has fewer rows.
    """
    opened = corpora.open_corpora(cfg) if opened is None else opened
    mixture.check_vocab(opened, vocab_size)
    rows = mixture.split_rows(opened, cfg, split="heldout", seed=HELDOUT_SEED)
    weights = [source.weight for source in cfg.sources]
    mixed = mixture.mix(rows, weights, seed=HELDOUT_SEED, repeat=False)
    if not 1 <= n_rows <= len(mixed):
        raise ValueError(
            f"n_rows={n_rows} must be in [1, {len(mixed)}], the rows that the held-out split has"
            f" at these weights with heldout_fraction={cfg.heldout_fraction}"
        )
    return _stack([mixed[i] for i in range(n_rows)])


def _stack(rows: Sequence[packing.Row]) -> Batch:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _identity(
    rows: Sequence[packing.Rows], cfg: config.DataConfig, split: config.Split
) -> dict[str, Any]:
    """Collect all that decides the batches, paths left out: data may move between runs."""
    return {
        "split": split,
        "seq_len": cfg.seq_len,
        "batch_size": cfg.batch_size,
        "seed": cfg.seed,
        "pack": cfg.pack,
        "shuffle": cfg.shuffle,
        "heldout_fraction": cfg.heldout_fraction,
        "weights": [source.weight for source in cfg.sources],
        "documents": [_digest(source) for source in rows],
    }


def _digest(rows: packing.Rows) -> str:
    """Hash which documents are cut into rows, and in which order."""
    keys = rows.corpus.keys[rows.order]
    digest = hashlib.sha256(np.ascontiguousarray(keys, "<u8").data)
    if isinstance(rows.corpus, corpora.ExampleCorpus):  # whose keys hash a part of them
        digest.update(np.ascontiguousarray(rows.corpus.stream, "<i4").data)
        digest.update(rows.corpus.trained.data)
    return digest.hexdigest()
