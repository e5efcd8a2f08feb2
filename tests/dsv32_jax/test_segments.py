import jax.numpy as jnp
import numpy as np

from dsv32_jax import segments

IDS = [
    [1, 1, 1, 2, 2, 0, 0],  # two documents, then padding
    [0, 7, 7, 0, 7, 9, 9],  # padding first and between two documents of one id
    [5, 5, 5, 5, 5, 5, 5],
]


def test_documents_start_where_the_id_changes():
    out = segments.from_ids(jnp.asarray(IDS))
    np.testing.assert_array_equal(
        out.start, [[0, 0, 0, 3, 3, 5, 5], [0, 1, 1, 3, 4, 5, 5], [0] * 7]
    )
    np.testing.assert_array_equal(
        out.position, [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 0, 0, 0, 1], list(range(7))]
    )
    np.testing.assert_array_equal(out.valid, np.array(IDS) != 0)


def test_a_token_sees_up_to_itself_and_padding_sees_nothing():
    out = segments.from_ids(jnp.asarray(IDS))
    expected = np.where(np.array(IDS) != 0, np.arange(1, 8), np.asarray(out.start))
    np.testing.assert_array_equal(out.end, expected)


def test_the_last_token_of_a_document_has_no_successor():
    np.testing.assert_array_equal(
        segments.next_is_same(jnp.asarray(IDS)),
        [[1, 1, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1, 0]],
    )


def test_shift_left_moves_successors_and_repeats_the_last():
    out = segments.shift_left(jnp.asarray([[1, 2, 3], [4, 5, 6]]))
    np.testing.assert_array_equal(out, [[2, 3, 3], [5, 6, 6]])


def test_running_sums_stay_inside_their_document(rng):
    values = rng.normal(size=(3, 7, 2))
    expected = values.copy()
    for row in range(3):
        for t in range(1, 7):
            if IDS[row][t] == IDS[row][t - 1]:
                expected[row, t] += expected[row, t - 1]

    out = segments.running_sum(
        jnp.asarray(values, jnp.float32), segments.from_ids(jnp.asarray(IDS))
    )

    np.testing.assert_allclose(out, expected, atol=1e-6)  # seven float32 additions
