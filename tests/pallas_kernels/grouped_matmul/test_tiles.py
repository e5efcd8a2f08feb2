import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import tiles

TILE = 16
SIZES = pytest.mark.parametrize(
    ("sizes", "n_rows"),
    [
        ((16, 32), 48),
        ((5, 0, 40, 1), 60),
        ((0, 0, 0), 17),
        ((0, 64), 64),
        ((64,), 64),
        ((1,) * 16, 16),
        ((15, 17, 31, 33), 96),
    ],
    ids=str,
)


@SIZES
def test_tiles_cover_each_row_once_in_its_own_group(sizes, n_rows):
    table, n_used = tiles.row_tiles(jnp.asarray(sizes, jnp.int32), n_rows, TILE)

    group_of_row = np.repeat(np.arange(len(sizes) + 1), (*sizes, n_rows - sum(sizes)))
    rows = []
    for group, row, n in np.asarray(table)[: int(n_used[0])]:
        assert 1 <= n <= TILE
        assert np.all(group_of_row[row : row + n] == group)
        rows.extend(range(row, row + n))
    assert rows == list(range(n_rows))


@SIZES
def test_a_tile_that_is_not_full_ends_its_group(sizes, n_rows):
    table, n_used = tiles.row_tiles(jnp.asarray(sizes, jnp.int32), n_rows, TILE)

    ends = np.cumsum((*sizes, n_rows - sum(sizes)))
    for group, row, n in np.asarray(table)[: int(n_used[0])]:
        assert n == TILE or row + n == ends[group]


def test_group_rows_are_first_row_and_size():
    table = tiles.group_rows(jnp.asarray((8, 0, 24), jnp.int32))
    np.testing.assert_array_equal(table, [[0, 8], [8, 0], [8, 24]])


@SIZES
def test_spread_groups_start_at_multiples_of_eight(sizes, n_rows):
    place, padded, n_places = tiles.spread_rows(jnp.asarray(sizes, jnp.int32), n_rows)

    place, padded = np.asarray(place), np.asarray(padded)
    assert np.all(padded % tiles.ROW_UNIT == 0)
    assert n_places % tiles.ROW_UNIT == 0
    assert place[-1] < n_places
    assert np.all(np.diff(place) >= 1)
    starts = np.cumsum(padded) - padded
    first = np.cumsum(sizes) - np.asarray(sizes)
    for start, row, size in zip(starts, first, sizes, strict=True):
        np.testing.assert_array_equal(place[row : row + size], start + np.arange(size))
    assert np.all(place[sum(sizes) :] >= np.sum(padded))  # rows past the last group stay past it
