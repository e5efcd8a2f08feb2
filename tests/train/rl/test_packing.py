import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.rl import packing
from train.rl.rollout import KeptSets, Rollout


def make(n_prompt, n_drawn, *, kept=False, experts=False, temperature=0.5, start=0):
    tokens = np.arange(start, start + n_prompt + n_drawn, dtype=np.int32)
    sets = None
    if kept:  # each token, and the one after it
        pairs = np.stack([tokens[n_prompt:], tokens[n_prompt:] + 1], axis=1)
        sets = KeptSets(pairs.ravel(), 2 * np.arange(1, n_drawn + 1))
    chosen = np.broadcast_to(tokens % 3, (2, 1, len(tokens))).reshape(2, -1, 1)
    return Rollout(
        tokens=tokens, n_prompt=n_prompt, log_p=-tokens[n_prompt:].astype(np.float32), kept=sets,
        experts=chosen if experts else None, temperature=temperature, reason="stop", version=0,
    )  # fmt: skip


@given(st.lists(st.integers(1, 10), max_size=30))
def test_every_sequence_has_a_place_and_no_row_overflows(lengths):
    rows = packing.plan_rows(lengths, 10)

    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 10 for row in rows)


def test_the_longest_come_first_and_fill_rows():
    assert packing.plan_rows([3, 9, 1, 6, 4], 10) == [[1, 2], [3, 4], [0]]


def test_a_rollout_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="a rollout of 11 tokens is longer than row_length=10"):
        packing.plan_rows([3, 11], 10)


def test_each_place_predicts_its_token_of_the_response():
    rollouts = [make(2, 3, start=10), make(1, 2, start=20, temperature=2.0), make(3, 1, start=30)]

    packed = packing.pack(rollouts, [[0, 1], [2]], n_rows=3, row_length=9)

    assert packed.tokens[0].tolist() == [10, 11, 12, 13, 14, 20, 21, 22, 0]
    assert packed.segment_ids.tolist()[:2] == [[1] * 5 + [2] * 3 + [0], [1] * 4 + [0] * 5]
    assert packed.place.shape == (3, 2, 4)
    for b, s, i in [(0, 0, 0), (0, 1, 1), (1, 0, 2)]:
        n = rollouts[i].n_drawn
        assert packed.rollout[b, s] == i
        assert packed.mask[b, s].tolist() == [True] * n + [False] * (4 - n)
        np.testing.assert_array_equal(
            packed.tokens[b, packed.place[b, s, :n] + 1], rollouts[i].response
        )
        np.testing.assert_array_equal(packed.log_p[b, s, :n], rollouts[i].log_p)
        assert (packed.temperature[b, packed.place[b, s, :n]] == rollouts[i].temperature).all()
    assert not packed.segment_ids[2].any()
    assert packed.rollout[2].tolist() == [-1, -1]
    # Prompt tokens that predict the prompt, and padding.
    assert packed.temperature[0].tolist() == [1, 0.5, 0.5, 0.5, 1, 2, 2, 1, 1]


def test_kept_sets_stand_at_the_places_that_predict():
    rollouts = [make(2, 3, start=10, kept=True), make(1, 2, start=20), make(1, 1, kept=True)]

    packed = packing.pack(rollouts, [[1, 0], [2]], n_rows=2, row_length=9)

    place, token = packed.kept
    assert place[0].tolist() == [4, 4, 5, 5, 6, 6, 9, 9]  # after the other's three tokens
    assert token[0].tolist()[:6] == [12, 13, 13, 14, 14, 15]
    assert place[1].tolist() == [0, 0] + [9] * 6


def test_a_token_outside_of_its_set_is_found_out():
    good = make(2, 3, start=10, kept=True)
    tokens = good.kept.tokens.copy()
    tokens[2:4] = 99
    wrong = dataclasses.replace(good, kept=KeptSets(tokens, good.kept.ends))

    with pytest.raises(ValueError, match="token 1 of a response, 13, is not in the set"):
        packing.pack([wrong], [[0]], n_rows=1, row_length=9)


def test_experts_lie_with_their_tokens_and_padding_has_none():
    rollouts = [make(2, 1, start=10, experts=True), make(1, 1, start=4, experts=True)]

    packed = packing.pack(rollouts, [[0, 1]], n_rows=2, row_length=6)

    assert packed.experts.shape == (2, 2, 6, 1)
    assert packed.experts[1, 0, :, 0].tolist() == [1, 2, 0, 1, 2, -1]
    assert (packed.experts[:, 1] == -1).all()


def test_experts_of_some_rollouts_only_are_refused():
    with pytest.raises(ValueError, match="some rollouts have experts and others none"):
        packing.pack([make(1, 1), make(1, 1, experts=True)], [[0, 1]], n_rows=1, row_length=6)


def test_stacked_microbatches_are_the_microbatches_of_their_rows():
    rollouts = [make(2, 3, kept=True, experts=True, start=10 * i) for i in range(4)]
    rows = [[0], [1], [2, 3]]

    stacked = packing.stack(packing.pack(rollouts, rows, n_rows=4, row_length=12), 2)

    for m, part in enumerate(([[0], [1]], [[2, 3]])):
        alone = packing.pack(rollouts, part, n_rows=2, row_length=12)
        for name in ("tokens", "segment_ids", "temperature", "experts"):
            np.testing.assert_array_equal(getattr(stacked, name)[m], getattr(alone, name), name)
        n = alone.mask.shape[1]  # the other microbatch has more rollouts in a row
        np.testing.assert_array_equal(stacked.mask[m][:, :n], alone.mask)
        np.testing.assert_array_equal(stacked.rollout[m][:, :n], alone.rollout)
        assert not stacked.mask[m][:, n:].any()
        for b in range(2):
            places = alone.kept.place[b] < 12
            np.testing.assert_array_equal(
                stacked.kept.token[m, b][stacked.kept.place[m, b] < 12], alone.kept.token[b][places]
            )
    assert (
        packing.stack(packing.pack([make(1, 2)], [[0]], n_rows=1, row_length=4), 1).experts is None
    )


def episode(start):
    """Prompt of 2, a turn of 2, a result of 1, a turn of 1; then a context of a prompt of 3 and a turn of 1."""
    trainable = np.array([0, 0, 1, 1, 0, 1, 0, 0, 0, 1], bool)
    tokens = np.arange(start, start + 10, dtype=np.int32)
    drawn = tokens[trainable]
    return dataclasses.replace(
        make(2, 8, start=start),
        log_p=-drawn.astype(np.float32),
        kept=KeptSets(np.stack([drawn, drawn + 1], axis=1).ravel(), 2 * np.arange(1, 5)),
        trainable=trainable,
        starts=(0, 6),
    )


def test_an_episode_is_one_response_whose_contexts_are_documents():
    packed = packing.pack([make(1, 2), episode(10)], [[0, 1]], n_rows=1, row_length=14)

    assert packed.segment_ids[0].tolist() == [1] * 3 + [2] * 6 + [3] * 4 + [0]
    assert packed.rollout.tolist() == [[0, 1]]
    assert packed.mask[0, 1].sum() == 4
    predicted = packed.tokens[0, packed.place[0, 1, :4] + 1]
    assert predicted.tolist() == [12, 13, 15, 19]
    assert packed.log_p[0, 1, :4].tolist() == [-12, -13, -15, -19]
    # No drawn token is predicted from another context.
    ends = packed.segment_ids[0, packed.place[0, 1, :4] + 1]
    assert packed.segment_ids[0, packed.place[0, 1, :4]].tolist() == ends.tolist()
    place, token = packed.kept
    assert place[0, :8].tolist() == [4, 4, 5, 5, 7, 7, 11, 11]
    assert token[0, :8].tolist() == [12, 13, 13, 14, 15, 16, 19, 20]
