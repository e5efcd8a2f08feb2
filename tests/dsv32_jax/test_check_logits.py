"""DSV32_PARITY_DATA names the folder with reference outputs; ../shared/data/parity beside the checkout by default."""

import dataclasses
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import check_logits, config, errors, load_model, parameters
from dsv32_jax.check_logits import Reference, RowErrors

PARITY = Path(
    os.environ.get("DSV32_PARITY_DATA") or Path(__file__).parents[3] / "shared" / "data" / "parity"
)
SMALL = PARITY / "small_fp32"
# Float32 rounding through four layers; 1.0e-5 is measured, and the reference's own two attention
# paths differ by as much.
SMALL_ATOL = 2e-5
CFG = dataclasses.replace(config.tiny(), n_layers=2, mtp=False)
ROWS, LENGTH = 2, 12
AGREES, DIFFERS, WRONG_USAGE = 0, 1, 2


def needs(path):
    return pytest.mark.skipif(not path.is_dir(), reason=f"no reference outputs in {path}")


@pytest.fixture(scope="module")
def arrays(draw):
    """Return tokens, logits and hidden states of the tiny model, put together layer by layer."""
    model = parameters.assemble(CFG, draw(CFG))
    tokens = np.random.default_rng(1).integers(0, CFG.vocab_size, (ROWS, LENGTH))

    @jax.jit
    def run(tokens):
        out = model(tokens, keep_hidden=True)
        first = out.dense.hidden[0]
        return model.logits(out.hidden), jnp.stack([model.embed[tokens], first, out.hidden])

    logits, hidden = run(tokens)
    return {"tokens": tokens, "logits": np.asarray(logits), "hidden": np.asarray(hidden)}


@pytest.fixture
def check(official, draw, tmp_path, capsys):
    """Write arrays to a file and run the command on the tiny model and that file."""

    def run(arrays, *options):
        folder, _, _ = official(CFG, draw(CFG))
        np.savez(tmp_path / "reference.npz", **arrays)
        status = check_logits.main([str(folder), str(tmp_path / "reference.npz"), *options])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@needs(SMALL)
def test_the_reference_implementations_logits_and_hidden_states_are_met(capsys):
    status = check_logits.main(
        [str(SMALL), str(SMALL / "reference.npz"), "--atol", f"{SMALL_ATOL}"]
    )

    out = capsys.readouterr().out
    assert status == AGREES
    assert f"positions above {SMALL_ATOL:g}: 0\n" in out
    worst = [float(text) for text in re.findall(r"max ([^ ,]+),", out)]
    assert len(worst) == 2 + 5  # logits, KL, embedding and four layers
    assert max(worst) <= SMALL_ATOL


@needs(PARITY / "blocks_fp8")
def test_fp8_files_can_be_checked(capsys):
    folder = PARITY / "blocks_fp8"

    check_logits.main([str(folder), str(folder / "reference.npz")])

    out = capsys.readouterr().out
    worst = {line[:12].strip(): line for line in out.splitlines() if line.startswith("  ")}
    assert "max 0.00e+00" in worst["embedding"]
    # Attention, indexer and the plain feed-forward. From the first experts on the reference has other weights than the
    # files: an unrounded shared_experts.down_proj; so the rest is compared in tests/dsv32_jax/convert/test_parity.py.
    assert float(re.findall(r"max ([^ ,]+),", worst["layer 0"])[0]) <= SMALL_ATOL


def test_a_model_agrees_with_itself(check, arrays):
    status, out, err = check(arrays, "--atol", "1e-5")

    assert status == AGREES
    lines = out.splitlines()
    assert lines[0].split() == ["positions", "24", "in", "2", "rows"]
    assert [line.split("max")[0].strip() for line in lines if line.startswith("  ")] == [
        "embedding",
        "layer 0",
        "layer 1, normed",
    ]
    assert max(float(text) for text in re.findall(r"max ([^ ,]+),", out)) < 1e-5
    assert lines[-1] == "agrees: 0.00% of the positions are above 1e-05; 0.2% may be"
    assert "row 2 of 2" in err


def test_one_wrong_logit_is_listed_with_its_place_and_fails_the_check(check, arrays):
    logits = arrays["logits"].copy()
    logits[1, 7, 90] += 0.5

    status, out, _ = check({"tokens": arrays["tokens"], "logits": logits})

    assert status == DIFFERS
    assert "positions above 0.0001: 1\n  row 1, position 7: 5.00e-01\n" in out
    assert "DIFFERS: 4.17% of the positions" in out
    assert "hidden" not in out


def test_padding_is_not_compared_and_one_row_needs_no_row_axis(check, arrays):
    tokens, logits = arrays["tokens"][1].copy(), arrays["logits"][1].copy()
    hidden = arrays["hidden"][:, 1].copy()
    tokens[9:], logits[9:], hidden[:, 9:] = -1, np.nan, np.nan

    status, out, _ = check({"tokens": tokens, "logits": logits, "hidden": hidden})

    assert status == AGREES
    assert out.splitlines()[0].split() == ["positions", "9", "in", "1", "rows"]
    assert "nan" not in out


def test_the_dtype_reaches_the_model(check, arrays, monkeypatch):
    asked = []

    def load(path, dtype):
        asked.append(dtype)
        raise errors.WorkFailedError("stop")

    monkeypatch.setattr(load_model, "load_model", load)

    assert check(arrays)[0] == check(arrays, "--dtype", "bfloat16")[0] == DIFFERS
    assert asked == ["float32", "bfloat16"]


def test_help_has_examples(capsys):
    assert check_logits.main(["--help"]) == 0
    assert "examples:\n  python -m dsv32_jax.check_logits " in capsys.readouterr().out


def test_bad_arguments_are_one_line(check, arrays, tmp_path, capsys):
    for options, message in [
        (("--atol", "x"), "argument --atol: x must be a number, 0 or above"),
        (("--atol", "-1"), "argument --atol: -1 must be a number, 0 or above"),
        (("--dtype", "float16"), "invalid choice: 'float16'"),
        (("--layers",), "unrecognized arguments: --layers"),
    ]:
        status, out, err = check(arrays, *options)
        assert (status, out, err.count("\n")) == (WRONG_USAGE, "", 1)
        assert message in err

    status = check_logits.main([str(tmp_path / "none"), str(tmp_path / "reference.npz")])
    assert (status, capsys.readouterr().err) == (
        WRONG_USAGE,
        f"error: no folder {tmp_path / 'none'}\n",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "lacks tokens; it has logits, hidden"),
        ({"logits": None, "tokens": None}, "lacks logits and tokens; it has hidden"),
        ({"tokens": np.zeros((2, 12))}, "tokens is float64; must be integer"),
        ({"logits": np.zeros((2, 12, 97), int)}, "logits is int64; must be floating"),
        ({"logits": np.zeros((2, 11, 97))}, "tokens [2, 12], logits [2, 11, 97], hidden [3, 2, 12"),
        ({"tokens": np.zeros((1, 2, 12), int)}, "tokens [1, 2, 12], logits [2, 12, 97]"),
        ({"hidden": np.zeros((3, 12, 32))}, "hidden [3, 12, 32] must be [B, T], [B, T, V] and [L+"),
        ({"tokens": np.full((2, 12), -1)}, "reference.npz has no token"),
        ({"tokens": np.array([["a"]], object)}, "tokens can not be read: Object arrays"),
    ],
)
def test_a_reference_with_wrong_arrays_is_refused(arrays, tmp_path, change, message):
    path = tmp_path / "reference.npz"
    kept = {name: array for name, array in (arrays | change).items() if array is not None}
    np.savez(path, **kept)

    with pytest.raises(ValueError, match=re.escape(message)):
        check_logits.read_reference(path)


def test_a_file_that_is_no_npz_is_refused(arrays, tmp_path):
    path = tmp_path / "reference.npz"
    with pytest.raises(FileNotFoundError, match="no file"):
        check_logits.read_reference(path)

    np.savez(path, **arrays)
    content = path.read_bytes()
    for wrong in (b"", b"text", content[: len(content) // 2]):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"reference\.npz is not an npz file"):
            check_logits.read_reference(path)

    damaged = bytearray(content)
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"reference\.npz: \w+ can not be read: Bad CRC"):
        check_logits.read_reference(path)


def reference(arrays, **change):
    return Reference(**(arrays | change))


@pytest.mark.parametrize(
    ("place", "token", "message"),
    [
        ((1, 3), 97, r"token 97 at row 1, position 3 is not in \[0, 97\)"),
        ((0, 11), -2, r"token -2 at row 0, position 11 is not in \[0, 97\)"),
        ((1, 3), -1, r"row 1 has padding \(-1\) before a token"),
    ],
)
def test_tokens_must_be_of_the_vocabulary_and_padding_at_the_end(arrays, place, token, message):
    tokens = arrays["tokens"].copy()
    tokens[place] = token

    with pytest.raises(ValueError, match=message):
        check_logits.check_fit(reference(arrays, tokens=tokens), CFG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 98}, "logits are over 97 tokens, the model's vocab_size is 98"),
        ({"dim": 40}, "hidden has 3 states of width 32, the model has 3 of 40"),
        ({"n_layers": 3}, "hidden has 3 states of width 32, the model has 4 of 32"),
    ],
)
def test_the_reference_must_be_of_this_models_size(arrays, change, message):
    with pytest.raises(ValueError, match=message):
        check_logits.check_fit(reference(arrays), dataclasses.replace(CFG, **change))


def test_errors_are_the_largest_of_each_position_and_kl_is_of_the_reference_against_us():
    theirs = np.log([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]) + 7.0
    ours = np.log([[0.125, 0.125, 0.75], [0.2, 0.3, 0.5]]) + 7.0

    rows = check_logits.row_errors(ours, theirs)

    np.testing.assert_allclose(rows.logit, [np.log(4), 0], atol=1e-12)
    divergence = 0.5 * np.log(0.5 / 0.125) + 0.25 * np.log(0.25 / 0.125) + 0.25 * np.log(1 / 3)
    np.testing.assert_allclose(rows.kl, [divergence, 0], atol=1e-12)
    assert rows.hidden is None


def test_hidden_errors_are_kept_layer_by_layer():
    theirs = np.zeros((2, 3, 4), np.float32)
    ours = theirs.astype(np.float64)
    ours[1, 2, 3] = -5

    rows = check_logits.row_errors(np.zeros((3, 5)), np.zeros((3, 5)), ours, theirs)

    np.testing.assert_array_equal(rows.hidden, [[0, 0, 0], [0, 0, 5]])


@pytest.mark.parametrize("side", [0, 1])
def test_a_nan_on_either_side_is_above_any_tolerance(side):
    pair = [np.zeros((4, 5)), np.zeros((4, 5))]
    pair[side][2, 3] = np.nan

    row = check_logits.row_errors(*pair)

    assert check_logits.share_above([row], 1e9) == 0.25
    text = check_logits.report([row], 1e9)
    assert "|logit error|      max nan" in text
    assert "positions above 1e+09: 1\n  row 0, position 2: nan\n" in text
    assert "DIFFERS" in text


def rows_with(n_above, n_positions=1000):
    logit = np.zeros(n_positions)
    logit[:n_above] = 1.0
    return [RowErrors(logit, np.zeros(n_positions), None)]


def test_a_share_of_two_in_a_thousand_is_let_pass_and_listed():
    assert check_logits.share_above(rows_with(2), 0.5) == check_logits.MAX_SHARE
    assert "agrees: 0.20%" in check_logits.report(rows_with(2), 0.5)
    assert "row 0, position 1: 1.00e+00" in check_logits.report(rows_with(2), 0.5)
    assert "DIFFERS: 0.30%" in check_logits.report(rows_with(3), 0.5)


def test_an_error_equal_to_the_tolerance_is_not_above_it():
    assert check_logits.share_above(rows_with(3), 1.0) == 0


def test_only_the_first_twenty_positions_are_listed_beside_their_count():
    text = check_logits.report(rows_with(21), 0.5)

    assert "positions above 0.5: 21, the first 20\n" in text
    assert text.count("  row 0, position") == 20
