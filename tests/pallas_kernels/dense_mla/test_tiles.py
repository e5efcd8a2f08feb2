import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense_mla import tiles

CASES = [(256, 256), (300, 300), (130, 700), (640, 100)]


def draw_bounds(rng, draw_ranges, n_queries, n_keys):
    start, end = draw_ranges(rng, (n_queries,), n_keys)
    return tiles.clip_ranges(jnp.asarray(start), jnp.asarray(end), n_keys, tiles.TILE)


def allowed(start, end, n_keys):
    key = np.arange(n_keys)
    return (key >= np.asarray(start)[:, None]) & (key < np.asarray(end)[:, None])


def test_clipped_ranges_repeat_the_last_row_up_to_a_tile():
    start, end = tiles.clip_ranges(jnp.array([-3, 2]), jnp.array([1, 99]), 5, 4)
    np.testing.assert_array_equal(start, [0, 2, 2, 2])
    np.testing.assert_array_equal(end, [1, 5, 5, 5])


@pytest.mark.parametrize(("n_queries", "n_keys"), CASES)
def test_query_tiles_read_every_allowed_key_and_mask_every_other(
    rng, draw_ranges, n_queries, n_keys
):
    start, end = draw_bounds(rng, draw_ranges, n_queries, n_keys)
    table = np.asarray(tiles.query_tiles(start, end, n_keys, 128))
    mask = np.pad(allowed(start, end, n_keys), ((0, 0), (0, -n_keys % 128)))
    assert sorted(table[:, 0]) == list(range(len(start) // 128))
    assert np.all(np.diff(table[:, 2] - table[:, 1]) <= 0)  # longest first
    for tile, first, last, *whole in table:
        rows = mask[tile * 128 : tile * 128 + 128]
        assert 0 <= first < last
        assert not rows[:, : first * 128].any()
        assert not rows[:, last * 128 :].any()
        for half in range(2):
            for block in range(first, last):
                part = rows[half * 64 : half * 64 + 64, block * 128 : block * 128 + 128]
                if whole[2 * half] <= block < whole[2 * half + 1]:
                    assert part.all()


@pytest.mark.parametrize(("n_queries", "n_keys"), CASES)
def test_key_tiles_are_read_by_every_query_that_may(rng, draw_ranges, n_queries, n_keys):
    start, end = draw_bounds(rng, draw_ranges, n_queries, n_keys)
    mask = np.pad(allowed(start, end, n_keys), ((0, 0), (0, -n_keys % 128)))
    for tile, row in enumerate(np.asarray(tiles.key_tiles(start, end, n_keys))):
        first, last, whole_first, whole_last = row
        columns = mask[:, tile * 128 : tile * 128 + 128]
        assert not columns[: first * 64].any()
        assert not columns[last * 64 :].any()
        for step in range(max(first, whole_first), min(last, whole_last)):
            assert columns[step * 64 : step * 64 + 64].all()


def test_causal_tiles_mask_the_diagonal_only():
    start, end = jnp.zeros(1024, jnp.int32), jnp.arange(1, 1025)
    for tile, first, last, *whole in np.asarray(tiles.query_tiles(start, end, 1024, 128)):
        assert (first, last, *whole) == (0, tile + 1, 0, tile, 0, tile)
    for tile, row in enumerate(np.asarray(tiles.key_tiles(start, end, 1024))):
        assert tuple(row) == (2 * tile, 16, min(2 * tile + 2, 16), 16)


def test_an_empty_query_tile_has_one_block_and_an_empty_key_tile_no_step():
    zero = jnp.zeros(128, jnp.int32)
    np.testing.assert_array_equal(tiles.query_tiles(zero, zero, 300, 128)[0, 1:3], [2, 3])
    np.testing.assert_array_equal(tiles.key_tiles(zero, zero, 300)[:, :2], np.zeros((3, 2)))


def test_packed_bits_are_the_mask(rng):
    mask = rng.uniform(size=(70, 200)) < 0.5
    by_key = np.asarray(tiles.pack_keys(jnp.asarray(mask), 128)).view(np.uint32)
    by_query = np.asarray(tiles.pack_queries(jnp.asarray(mask))).view(np.uint32)
    assert by_key.shape == (256 // 32, 128)
    assert by_query.shape == (128 // 32, 256)
    for t, s in np.ndindex(mask.shape):
        assert by_key[s // 32, t] >> (s % 32) & 1 == mask[t, s]
        assert by_query[t // 32, s] >> (t % 32) & 1 == mask[t, s]
