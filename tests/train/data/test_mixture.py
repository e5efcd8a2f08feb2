import collections
import dataclasses

import numpy as np
import pytest

from train.data import config, corpus, mixture, packing


class NumberedRows(packing.Rows):
    """Rows that are their source's name and their own number."""

    def __init__(self, name, n_rows):
        self.name = name
        self.n_rows = n_rows

    def __len__(self):
        return self.n_rows

    def __getitem__(self, row):
        return (self.name, row)

    def pieces(self, row):
        raise NotImplementedError


def mix(rows, weights, *, seed=5, repeat=True):
    return mixture.mix(rows, weights, seed=seed, repeat=repeat)


def test_sources_come_as_often_as_their_weights_say():
    weights = {"a": 5.0, "b": 3.0, "c": 0.5}
    mixed = mix([NumberedRows(name, 500) for name in weights], list(weights.values()))
    for start in (0, 850, 12345):
        names = collections.Counter(mixed[i][0] for i in range(start, start + 850))
        for name, weight in weights.items():
            assert abs(names[name] - 100 * weight) <= 2


def test_each_epoch_has_every_row_once_in_a_new_order():
    mixed = mix([NumberedRows("a", 50)], [1.0])
    epochs = [[mixed[i] for i in range(50 * e, 50 * e + 50)] for e in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(epochs[0])) == 50
    assert epochs[0] != epochs[1] != epochs[2]


def test_another_seed_gives_another_order():
    rows = [NumberedRows("a", 50)]
    first, again, other = (mix(rows, [1.0], seed=seed) for seed in (1, 1, 9))
    assert [first[i] for i in range(50)] == [again[i] for i in range(50)]
    assert [first[i] for i in range(50)] != [other[i] for i in range(50)]


def test_without_a_seed_rows_keep_their_order():
    mixed = mix([NumberedRows("a", 3)], [1.0], seed=None)
    assert [mixed[i][1] for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_without_repeating_no_row_comes_twice():
    mixed = mix([NumberedRows("a", 40), NumberedRows("b", 9)], [1.0, 1.0], repeat=False)
    seen = [mixed[i] for i in range(len(mixed))]
    assert len(seen) == len(set(seen)) == 18


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("seed", [None, 4])
def test_train_and_held_out_rows_share_no_document_and_miss_none(cfg, pack, seed):
    opened = corpus.open_corpora(cfg)
    cfg = dataclasses.replace(cfg, pack=pack)
    sides = [
        mixture.split_rows(opened, cfg, split=split, seed=seed)[0] for split in ("train", "heldout")
    ]
    texts = [
        {bytes(opened[0].tokens(int(i), 0, int(opened[0].lengths[i]))) for i in side.order}
        for side in sides
    ]
    assert not texts[0] & texts[1]
    orders = np.concatenate([side.order for side in sides])
    assert sorted(orders) == list(range(len(opened[0].lengths)))


def test_an_empty_side_is_an_error_that_says_what_to_change(cfg):
    cfg = dataclasses.replace(cfg, heldout_fraction=0.0)
    with pytest.raises(ValueError, match=r"heldout split of source '.*' is empty: 39 documents"):
        mixture.split_rows(corpus.open_corpora(cfg), cfg, split="heldout", seed=0)


def test_a_vocabulary_that_is_too_small_is_an_error(cfg):
    opened = corpus.open_corpora(cfg)
    mixture.check_vocab(opened, 259)
    with pytest.raises(ValueError, match=r"vocabulary too small: vocab_size=258.* up to 258"):
        mixture.check_vocab(opened, 258)


def test_the_vocabulary_check_names_the_source_at_fault(cfg, tmp_path):
    (tmp_path / "other.txt").write_text("text")
    sources = (*cfg.sources, config.Source(path=str(tmp_path / "other.txt")))
    opened = corpus.open_corpora(dataclasses.replace(cfg, sources=sources))
    opened[1].n_ids = 1000
    with pytest.raises(ValueError, match=r"other\.txt' has token ids up to 999"):
        mixture.check_vocab(opened, 259)
