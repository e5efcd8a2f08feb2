import types

import numpy as np
import pytest

from train.data import config, packing

KINDS = [packing.PackedRows, packing.DocumentRows]
LENGTHS = np.random.default_rng(1).integers(1, 17, size=60)


def corpus_of(lengths):
    """Documents whose every token names its document and place: id = 1000 * document + place."""
    return types.SimpleNamespace(
        source=config.Source(path="made up"),
        keys=np.arange(len(lengths), dtype=np.uint64),
        n_ids=1000 * len(lengths),
        lengths=np.array(lengths, np.int64),
        tokens=lambda document, start, stop: (
            np.arange(start, stop, dtype=np.int32) + 1000 * document
        ),
    )


@pytest.fixture
def corpus():
    return corpus_of(np.random.default_rng(0).integers(1, 60, size=50))


def cut(kind, corpus, seq_len=16, order=None):
    order = np.arange(len(corpus.lengths)) if order is None else np.array(order, np.int64)
    rows = kind(corpus, order=order, seq_len=seq_len)
    return rows, [rows[i] for i in range(len(rows))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq_len", [2, 3, 16, 1000])
def test_every_token_lies_in_exactly_one_row(corpus, kind, seq_len):
    rows, made = cut(kind, corpus, seq_len)
    kept = np.concatenate([row["tokens"][row["segment_ids"] > 0] for row in made])
    want = np.concatenate([corpus.tokens(i, 0, n) for i, n in enumerate(corpus.lengths)])
    np.testing.assert_array_equal(kept, want)
    assert rows.n_tokens == len(want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_is_an_unbroken_part_of_one_document(corpus, kind):
    for row in cut(kind, corpus)[1]:
        for segment in range(1, row["segment_ids"].max() + 1):
            part = row["tokens"][row["segment_ids"] == segment]
            np.testing.assert_array_equal(np.diff(part), 1)
            assert part[0] // 1000 == part[-1] // 1000


@pytest.mark.parametrize("kind", KINDS)
def test_two_segments_of_a_row_are_two_documents(corpus, kind):
    for row in cut(kind, corpus)[1]:
        starts = np.flatnonzero(np.diff(row["segment_ids"], prepend=0) > 0)
        owners = row["tokens"][starts] // 1000
        assert len(set(owners)) == row["segment_ids"].max()


@pytest.mark.parametrize("kind", KINDS)
def test_segments_count_from_one_and_padding_comes_last_as_zeros(corpus, kind):
    for row in cut(kind, corpus)[1]:
        assert row["tokens"].dtype == row["segment_ids"].dtype == np.int32
        assert row["tokens"].shape == row["segment_ids"].shape == (16,)
        used = int((row["segment_ids"] > 0).sum())
        assert row["segment_ids"][0] == 1
        assert set(np.diff(row["segment_ids"][:used])) <= {0, 1}
        assert not row["segment_ids"][used:].any()
        assert not row["tokens"][used:].any()


def test_only_the_last_packed_row_has_padding(corpus):
    made = cut(packing.PackedRows, corpus)[1]
    assert all(row["segment_ids"].all() for row in made[:-1])


def test_an_unpacked_row_holds_one_document(corpus):
    assert {row["segment_ids"].max() for row in cut(packing.DocumentRows, corpus)[1]} == {1}


def test_a_long_unpacked_document_is_cut_into_as_few_even_parts_as_fit():
    sizes = [int(row["segment_ids"].sum()) for row in cut(packing.DocumentRows, corpus_of([17]))[1]]
    assert sorted(sizes) == [8, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_chosen_documents_come_in_the_order_given(corpus, kind):
    made = cut(kind, corpus, order=[7, 3])[1]
    kept = np.concatenate([row["tokens"][row["segment_ids"] > 0] for row in made])
    assert list(dict.fromkeys(kept // 1000)) == [7, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_document_makes_no_segment(kind):
    made = cut(kind, corpus_of([0, 5, 0, 0, 6, 0]), seq_len=5)[1]
    assert all(row["segment_ids"][0] == 1 for row in made)
    assert sum(int((row["segment_ids"] > 0).sum()) for row in made) == 11


def test_an_empty_document_within_a_row_takes_no_segment_number():
    (row,) = cut(packing.PackedRows, corpus_of([2, 0, 2]), seq_len=5)[1]
    assert row["segment_ids"].tolist() == [1, 1, 2, 2, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_no_documents_make_no_rows(corpus, kind):
    assert cut(kind, corpus, order=[])[1] == []


def test_whole_rows_hold_each_document_once_and_uncut():
    rows, made = cut(packing.WholeRows, corpus_of(LENGTHS))
    found = [
        (int(row["tokens"][where[0]]) // 1000, len(where))
        for row in made
        for segment in range(1, row["segment_ids"].max() + 1)
        for where in [np.flatnonzero(row["segment_ids"] == segment)]
    ]

    assert sorted(found) == list(enumerate(LENGTHS))
    for row in made:
        used = row["tokens"][row["segment_ids"] > 0]
        assert set(np.diff(used)) - {1} == set() or row["segment_ids"].max() > 1
        assert not row["tokens"][len(used) :].any()
    assert rows.n_tokens == LENGTHS.sum()


def test_whole_rows_leave_less_room_than_a_row_each_and_never_two_rows_that_fit_in_one():
    used = [
        int((row["segment_ids"] > 0).sum()) for row in cut(packing.WholeRows, corpus_of(LENGTHS))[1]
    ]

    assert min(used) > 0
    assert sum(sorted(used)[:2]) > 16  # else the later one's first document had gone into the other


def test_a_document_goes_where_it_leaves_the_least_room():
    rows, _ = cut(packing.WholeRows, corpus_of([10, 13, 3, 6]))

    assert [[piece.document for piece in rows.pieces(i)] for i in range(len(rows))] == [
        [0, 3],
        [1, 2],
    ]


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="document 1 has 17 tokens, rows only 16"):
        cut(packing.WholeRows, corpus_of([4, 17]))
