import dataclasses
import itertools
import json

import numpy as np
import pytest

from train.data import config, corpus, loader

N_STEPS = 40  # some five epochs of the small configuration


def make(cfg, *, host=0, n_hosts=1, split="train", vocab_size=259, opened=None):
    return loader.make_loader(
        cfg, host=host, n_hosts=n_hosts, split=split, vocab_size=vocab_size, opened=opened
    )


def take(source, n):
    return list(itertools.islice(source, n))


def join(parts):
    """Put the hosts' parts of a batch together."""
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def assert_same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for key in batch:
            np.testing.assert_array_equal(batch[key], other[key])


def tokens_of(batches):
    return sorted(int(t) for batch in batches for t in batch["tokens"][batch["segment_ids"] > 0])


@pytest.fixture
def two_sources(cfg, tmp_path):
    (tmp_path / "more").mkdir()
    for i in range(30):
        (tmp_path / f"more/{i}.txt").write_text(f"document {i} " * (i + 1))
    more = config.Source(path=str(tmp_path / "more"), weight=3.0)
    return dataclasses.replace(cfg, sources=(*cfg.sources, more))


@pytest.fixture(params=["one source", "two sources", "unpacked", "in order", "prefetched"])
def any_cfg(request, cfg, two_sources):
    return {
        "one source": cfg,
        "two sources": two_sources,
        "unpacked": dataclasses.replace(two_sources, pack=False),
        "in order": dataclasses.replace(two_sources, shuffle=False),
        "prefetched": dataclasses.replace(two_sources, prefetch=3),
    }[request.param]


def test_a_batch_is_int32_rows_of_the_hosts_share(cfg):
    batch = next(make(cfg, host=1, n_hosts=2))
    assert set(batch) == {"tokens", "segment_ids"}
    for value in batch.values():
        assert value.shape == (4, 16)
        assert value.dtype == np.int32


@pytest.mark.parametrize("n_hosts", [2, 4, 8])
def test_the_hosts_parts_make_the_batches_of_one_host(any_cfg, n_hosts):
    whole = take(make(any_cfg), N_STEPS)
    hosts = [take(make(any_cfg, host=h, n_hosts=n_hosts), N_STEPS) for h in range(n_hosts)]
    assert_same([join(parts) for parts in zip(*hosts, strict=True)], whole)


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (2, 8)])
def test_a_state_restores_under_another_host_count(any_cfg, before, after):
    saved = make(any_cfg, host=before - 1, n_hosts=before)
    take(saved, 7)
    state = json.loads(json.dumps(saved.state()))
    want = take(make(any_cfg), 7 + N_STEPS)[7:]
    hosts = [make(any_cfg, host=h, n_hosts=after) for h in range(after)]
    for host in hosts:
        host.restore(state)
    parts = zip(*(take(host, N_STEPS) for host in hosts), strict=True)
    assert_same([join(part) for part in parts], want)


def test_the_state_is_the_same_on_every_host(cfg):
    hosts = [make(cfg, host=h, n_hosts=2) for h in range(2)]
    for host in hosts:
        take(host, 3)
    assert hosts[0].state() == hosts[1].state()
    assert hosts[0].state()["step"] == 3


def test_a_loader_goes_back_to_an_earlier_state(any_cfg):
    source = make(any_cfg)
    take(source, 2)
    state = source.state()
    first = take(source, 5)
    source.restore(state)
    assert_same(take(source, 5), first)


def test_an_iterator_taken_again_goes_on(cfg):
    source = make(cfg)
    first = [*take(iter(source), 2), *take(iter(source), 2)]
    assert_same(first, take(make(cfg), 4))


def test_an_epoch_has_every_train_token_once_whatever_the_epoch(cfg):
    source = make(dataclasses.replace(cfg, batch_size=1))
    epochs = [take(source, source.n_rows) for _ in range(2)]
    opened = corpus.open_corpora(cfg)[0]
    cuts = {int(i) for i in source_order(cfg)}
    want = sorted(int(t) for i in cuts for t in opened.tokens(i, 0, int(opened.lengths[i])))
    assert tokens_of(epochs[0]) == tokens_of(epochs[1]) == want
    assert source.n_tokens_per_epoch == len(want)
    assert [b["tokens"].tobytes() for b in epochs[0]] != [b["tokens"].tobytes() for b in epochs[1]]


def source_order(cfg):
    opened = corpus.open_corpora(cfg)
    heldout = opened[0].keys < np.uint64(int(cfg.heldout_fraction * 2**64))
    return np.flatnonzero(~heldout)


def test_another_seed_gives_other_batches(cfg):
    first = next(make(cfg))
    other = next(make(dataclasses.replace(cfg, seed=4)))
    assert first["tokens"].tolist() != other["tokens"].tolist()


def test_without_shuffling_rows_come_in_the_order_of_the_lines(cfg, texts):
    plain = dataclasses.replace(cfg, shuffle=False, heldout_fraction=0.0, batch_size=1)
    source = make(plain)
    made = take(source, source.n_rows)
    ids = np.concatenate([b["tokens"][b["segment_ids"] > 0] for b in made])
    assert bytes(ids[ids < 256].tolist()).decode() == "".join(texts)


def test_opened_corpora_serve_several_loaders(two_sources):
    opened = corpus.open_corpora(two_sources)
    assert_same(take(make(two_sources, opened=opened), 3), take(make(two_sources), 3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_len": 32}, "seq_len was 16, is 32"),
        ({"batch_size": 4}, "batch_size was 8, is 4"),
        ({"seed": 9}, "seed was 3, is 9"),
        ({"pack": False}, "pack was True, is False"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"heldout_fraction": 0.5}, r"heldout_fraction was 0\.25, is 0\.5"),
    ],
)
def test_a_state_of_another_configuration_is_an_error_that_names_the_field(cfg, change, words):
    state = make(cfg).state()
    with pytest.raises(ValueError, match=f"saved from other data: {words}"):
        make(dataclasses.replace(cfg, **change)).restore(state)


def test_a_state_of_other_documents_weights_or_split_is_an_error(cfg, two_sources, jsonl):
    state = make(two_sources).state()
    first, second = two_sources.sources
    heavier = dataclasses.replace(
        two_sources, sources=(first, dataclasses.replace(second, weight=4.0))
    )
    with pytest.raises(ValueError, match=r"weights was \[1\.0, 3\.0\], is \[1\.0, 4\.0\]"):
        make(heavier).restore(state)
    with pytest.raises(ValueError, match="split was 'train', is 'heldout'"):
        make(two_sources, split="heldout").restore(state)
    state = make(cfg).state()
    with jsonl.open("a") as file:
        file.writelines(json.dumps({"text": f"more text {i}"}) + "\n" for i in range(20))
    with pytest.raises(ValueError, match="documents was"):
        make(cfg).restore(state)


def test_data_that_moved_still_restore(cfg, jsonl, tmp_path):
    source = make(cfg)
    want = take(source, 3)[2:]
    moved = jsonl.rename(tmp_path / "moved.jsonl")
    moved_cfg = dataclasses.replace(cfg, sources=(config.Source(path=str(moved)),))
    other = make(moved_cfg)
    other.restore(source.state() | {"step": 2})
    assert_same(take(other, 1), want)


@pytest.mark.parametrize("state", [{}, {"step": -1, "data": {}}, {"step": "3", "data": {}}])
def test_what_is_no_state_is_an_error(cfg, state):
    with pytest.raises(ValueError, match="not a data loader's state"):
        make(cfg).restore(state)


@pytest.mark.parametrize(("host", "n_hosts"), [(2, 2), (-1, 2), (0, 0)])
def test_a_host_out_of_range_is_an_error(cfg, host, n_hosts):
    with pytest.raises(ValueError, match=rf"host={host} must be in \[0, n_hosts={n_hosts}\)"):
        make(cfg, host=host, n_hosts=n_hosts)


def test_a_batch_that_hosts_can_not_share_is_an_error(cfg):
    with pytest.raises(ValueError, match="batch_size=8 must be a multiple of n_hosts=3"):
        make(cfg, n_hosts=3)


def test_a_vocabulary_that_is_too_small_is_an_error(cfg):
    with pytest.raises(ValueError, match="vocabulary too small"):
        make(cfg, vocab_size=100)
    with pytest.raises(ValueError, match="vocabulary too small"):
        loader.heldout_rows(cfg, 1, vocab_size=100)


def test_held_out_rows_are_the_same_for_every_seed_and_batch_size(two_sources):
    other = dataclasses.replace(two_sources, seed=99, batch_size=2, shuffle=False)
    rows = loader.heldout_rows(two_sources, 6, vocab_size=259)
    assert rows["tokens"].shape == (6, 16)
    assert_same([rows], [loader.heldout_rows(other, 6, vocab_size=259)])


def test_held_out_rows_come_from_the_held_out_split_each_once(cfg):
    source = make(dataclasses.replace(cfg, batch_size=1), split="heldout")
    rows = loader.heldout_rows(cfg, source.n_rows, vocab_size=259)
    assert tokens_of([rows]) == tokens_of(take(source, source.n_rows))


def test_fewer_held_out_rows_only_drop_the_last(cfg):
    many = loader.heldout_rows(cfg, 5, vocab_size=259)
    few = loader.heldout_rows(cfg, 2, vocab_size=259)
    assert_same([few], [{key: value[:2] for key, value in many.items()}])


@pytest.mark.parametrize("n_rows", [0, 10_000])
def test_more_held_out_rows_than_there_are_is_an_error(cfg, n_rows):
    with pytest.raises(ValueError, match=rf"n_rows={n_rows} must be in \[1, \d+\]"):
        loader.heldout_rows(cfg, n_rows, vocab_size=259)


def test_the_default_corpus_serves_batches_with_nothing_to_download():
    cfg = config.DataConfig(seq_len=256, batch_size=8, seed=0)
    opened = corpus.open_corpora(cfg)
    assert next(make(cfg, opened=opened))["tokens"].shape == (8, 256)
    assert loader.heldout_rows(cfg, 64, vocab_size=259, opened=opened)["tokens"].max() < 259
