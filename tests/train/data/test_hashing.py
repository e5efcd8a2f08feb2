import numpy as np
import pytest

from train.data import hashing

KEYS = np.random.default_rng(0).integers(0, 2**64, size=4000, dtype=np.uint64)


def split(keys, fraction, side):
    return hashing.split_documents(keys, heldout_fraction=fraction, split=side)


def test_a_key_depends_on_the_ids_alone():
    ids = np.array([1, 2, 3], np.int32)
    every_other = np.array([1, 9, 2, 9, 3], np.int32)[::2]
    assert hashing.document_key(ids) == hashing.document_key(every_other)
    assert hashing.document_key(ids) != hashing.document_key(ids[::-1].copy())


def test_keys_do_not_change_between_releases():
    # Fixed for all time: a change would move documents from held-out to train in resumed runs.
    assert hashing.document_key(np.array([1, 2, 3], np.int32)) == 11402386789778234582


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5])
def test_the_two_sides_partition_the_documents(fraction):
    train, heldout = split(KEYS, fraction, "train"), split(KEYS, fraction, "heldout")
    assert sorted([*train, *heldout]) == list(range(len(KEYS)))
    assert abs(len(heldout) / len(KEYS) - fraction) < 0.02


def test_a_documents_side_depends_on_its_key_alone():
    reordered = KEYS[::-1][:1000]
    heldout = set(KEYS[split(KEYS, 0.2, "heldout")])
    assert set(reordered[split(reordered, 0.2, "heldout")]) == heldout & set(reordered)


def test_a_larger_fraction_only_adds_held_out_documents():
    assert set(split(KEYS, 0.1, "heldout")) < set(split(KEYS, 0.2, "heldout"))


def test_shuffling_keeps_each_document_and_depends_on_the_seed():
    chosen = np.arange(100)
    orders = [hashing.shuffle_documents(chosen, keys=KEYS, seed=seed) for seed in (1, 1, 2)]
    assert all(sorted(order) == list(chosen) for order in orders)
    np.testing.assert_array_equal(orders[0], orders[1])
    assert list(orders[0]) != list(orders[2])


def test_shuffling_does_not_depend_on_the_order_of_files():
    forward = KEYS[hashing.shuffle_documents(np.arange(4000), keys=KEYS, seed=1)]
    turned = KEYS[::-1].copy()
    backward = turned[hashing.shuffle_documents(np.arange(4000), keys=turned, seed=1)]
    np.testing.assert_array_equal(forward, backward)


def test_copies_of_a_document_fall_apart():
    few = np.random.default_rng(1).choice(KEYS[:50], size=4000)

    order = few[hashing.shuffle_documents(np.arange(4000), keys=few, seed=1)]

    # Drawn by chance, one neighbour in fifty is a copy.
    assert np.mean(order[1:] == order[:-1]) < 0.03
    assert sorted(order) == sorted(few)


def test_the_order_of_documents_without_copies_is_fixed_for_all_time():
    keys = np.arange(1, 9, dtype=np.uint64) * np.uint64(0x123456789)
    assert hashing.shuffle_documents(np.arange(8), keys=keys, seed=3).tolist() == [
        6,
        1,
        2,
        3,
        0,
        7,
        5,
        4,
    ]


def test_no_documents_have_no_order():
    assert hashing.shuffle_documents(np.arange(0), keys=KEYS, seed=1).tolist() == []
