import dataclasses
import os
import re

import pytest

from dsv32_jax import config
from dsv32_jax.convert import storage

DONE, WRONG_USAGE = 0, 2


@pytest.mark.parametrize("args", [["--help"], ["from-hf", "--help"], ["to-hf", "--help"]])
def test_help_shows_whole_command_lines(convert, args):
    status, out, _ = convert(*args)

    assert status == DONE
    assert "examples:\n  python -m dsv32_jax.convert " in out
    assert "SRC" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the direction comes first, one of from-hf, to-hf;"),
        (["sideways"], "first, one of from-hf, to-hf, not sideways;"),
        (["--threads", "2", "from-hf"], "first, one of from-hf, to-hf, not --threads;"),
        (["from-hf", "--dtipe", "fp8"], "unrecognized arguments: --dtipe; did you mean --dtype"),
        (["from-hf"], "required: SRC, DST"),
        (["from-hf", "a"], "required: DST"),
        (["from-hf", "nowhere", "dst"], "no folder .*nowhere"),
        (["to-hf", "nowhere", "dst"], "no folder .*nowhere"),
        (["from-hf", "a", "b", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["from-hf", "a", "b", "--threads", "0"], "0 must be a whole number, 1 to"),
        (["from-hf", "a", "b", "--seed", "-1"], "-1 must be a whole number, 0 to"),
        (["from-hf", "a", "b", "--seed", "x"], "x must be a whole number"),
        (["to-hf", "a", "b", "--shard-gb", "0"], "0 must be a number above 0"),
        (["to-hf", "a", "b", "--shard-gb", "1e300"], "1e300 must be a number above 0, at most"),
        (["from-hf", "gs://a", "b"], r"gs://a needs .* gcsfs: pip install 'dsv32-jax\[gcs\]'"),
        (["to-hf", "a", "b", "--seed", "0"], "unrecognized arguments: --seed"),
        (
            ["from-hf", "a", "b", "--process-count", "2"],
            "--process-count given but not --coordinator, --process-index",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(convert, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage, "is_installed", lambda package: False)

    status, _, err = convert(*args)

    assert status == WRONG_USAGE
    assert len(err.splitlines()) == 1
    assert re.search(message, err), err
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("where", [".", "inside", "..", "../link/inside"])
def test_a_folder_is_not_converted_into_itself(official_fp8, convert, where):
    folder, _, _ = official_fp8()
    (folder.parent / "link").symlink_to(folder)

    status, _, err = convert("from-hf", folder, os.path.abspath(folder / where))

    assert (status, "SRC and DST must be folders of their own" in err) == (WRONG_USAGE, True)


@pytest.mark.parametrize(
    ("scale_fmt", "dtype", "message"),
    [
        ("ue8m0", "bf16", None),
        ("ue8m0", "fp8", None),
        (None, "fp8", None),
        (
            None,
            "bf16",
            "FP8 weights times scales that need not be powers of two are rounded to bf16",
        ),
    ],
)
def test_what_fp8_weights_lose_is_said(
    official_fp8, official, convert, tmp_path, scale_fmt, dtype, message
):
    folder, raw, tensors = official_fp8()
    if scale_fmt is None:
        del raw["quantization_config"]["scale_fmt"]
        official(raw=raw, tensors=tensors, n_files=3)

    _, _, err = convert("from-hf", folder, tmp_path / "dst", "--dtype", dtype)

    assert ("rounded" in err) == (message is not None)
    assert message is None or message in err


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("float32", None),
        ("bf16", "float32 weights are rounded to bf16"),
        ("fp8", "weights are rounded to FP8, with power-of-two scales"),
    ],
)
def test_what_float32_weights_lose_is_said(official, draw, convert, tmp_path, dtype, message):
    cfg = dataclasses.replace(config.tiny(), n_layers=1)
    folder, _, _ = official(cfg, draw(cfg))

    _, _, err = convert("from-hf", folder, tmp_path / "dst", "--dtype", dtype)

    assert ("rounded" in err) == (message is not None)
    assert message is None or message in err


def test_progress_goes_to_standard_error_with_rates_and_time_left(official_fp8, convert, tmp_path):
    folder, _, _ = official_fp8()

    _, out, err = convert("from-hf", folder, tmp_path / "dst")

    lines = err.splitlines()
    assert any(
        line.startswith("converting 0.0/0.0 GB  ") and line.endswith(" left") for line in lines
    )
    assert any(line.startswith("verifying 0.0/0.0 GB  ") for line in lines)
    assert "GB/s" in err
    assert out.count("\n") == 1
    assert str(tmp_path / "dst") in out
