import itertools
import json
import re
import time

import ml_dtypes
import numpy as np
import pytest

from dsv32_jax.convert import safetensors_io, workers

DONE, FAILED, WRONG_USAGE = 0, 1, 2
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


def with_value(tensors, name, at, value):
    changed = tensors[name].copy()
    changed[at] = value
    return tensors | {name: changed}


def with_code(tensors, name, at, code):
    changed = tensors[name].copy()
    changed.view(np.uint8)[at] = code
    return tensors | {name: changed}


SCALE = f"{EXPERT}_scale_inv"
BAD_TENSORS = {
    "missing tensor": (lambda t: without(t, EXPERT), WRONG_USAGE, f"lacks 1 tensors.*{EXPERT}"),
    "missing scale": (
        lambda t: without(t, SCALE), WRONG_USAGE, rf"lacks {SCALE}, the scale of {EXPERT} in .*safet",
    ),
    "scale of nothing": (
        lambda t: t | {"lm_head.weight_scale_inv": np.ones((1, 2), np.float32)},
        WRONG_USAGE, r"lm_head.weight_scale_inv is there, but lm_head.weight is BF16",
    ),
    "unknown tensor": (
        lambda t: t | {"model.layers.0.x": np.ones(3, np.float32)},
        WRONG_USAGE, r"does not know, first model.layers.0.x in model-0000",
    ),
    "wrong shape": (
        lambda t: t | {EXPERT: t[EXPERT][:, :-1]},
        WRONG_USAGE, rf"model-0000\d-of-000003.safetensors: {EXPERT} has shape \[160, 135\], .* \[160, 136\]",
    ),
    "wrong scale shape": (
        lambda t: t | {SCALE: np.ones((2, 1), np.float32)},
        WRONG_USAGE, rf"{SCALE} has shape \[2, 1\], the config asks for \[2, 2\]",
    ),
    "wrong dtype": (
        lambda t: t | {EXPERT: t[EXPERT].astype(np.float16)}, WRONG_USAGE, rf"{EXPERT} is F16; only",
    ),
    "wrong scale dtype": (
        lambda t: t | {SCALE: t[SCALE].astype(ml_dtypes.bfloat16)},
        WRONG_USAGE, rf"safetensors: {SCALE} is BF16 instead of F32",
    ),
    "quantised embedding": (
        lambda t: t | {"lm_head.weight": t["lm_head.weight"].astype(ml_dtypes.float8_e4m3fn)},
        WRONG_USAGE, "lm_head.weight is F8_E4M3; this tensor is never quantised",
    ),
    "NaN scale": (
        lambda t: with_value(t, SCALE, (1, 0), np.nan),
        FAILED, rf"safetensors: {SCALE}\[1, 0\]=nan must be a positive finite number",
    ),
    "zero scale": (
        lambda t: with_value(t, SCALE, (0, 1), 0), FAILED, rf"{SCALE}\[0, 1\]=0.0 must be a positive",
    ),
    "scale no power of two": (
        lambda t: with_value(t, SCALE, (0, 1), 0.75),
        FAILED, rf"{SCALE}\[0, 1\]=0.75 must be a power of two",
    ),
    "NaN in FP8": (
        lambda t: with_code(t, EXPERT, (130, 7), 0xFF),
        FAILED, rf"safetensors: {EXPERT}\[130, 7\]=nan is not a finite number",
    ),
    "infinity in bf16": (
        lambda t: with_value(t, "lm_head.weight", (3, 4), np.inf),
        FAILED, r"lm_head.weight\[3, 4\]=inf is not a finite",
    ),
    "NaN in float32": (
        lambda t: with_value(t, "model.norm.weight", 9, np.nan),
        FAILED, r"model.norm.weight\[9\]=nan is not a finite",
    ),
    "product beyond float32": (
        lambda t: with_code(with_value(t, SCALE, (1, 0), 2.0**120), EXPERT, (130, 7), 0x7E),
        FAILED, rf"safetensors: {EXPERT}\[130, 7\], .* is beyond the range of float32",
    ),
    "MTP copy that differs": (
        lambda t: with_value(t, "model.layers.2.embed_tokens.weight", (5, 5), 7),
        FAILED, "layers.2.embed_tokens.weight differs from the main model's model.embed_tokens.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_bad_tensor_is_named_in_one_line_and_leaves_nothing_whole(
    official_fp8, official, convert, assert_is_refused, tmp_path, case
):
    change, want_status, message = BAD_TENSORS[case]
    folder, raw, tensors = official_fp8()
    official(raw=raw, tensors=change(tensors), n_files=3)

    status, out, err = convert("from-hf", folder, tmp_path / "dst")

    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert (status, len(lines), out) == (want_status, 1, ""), err
    assert re.search(message, lines[0]), lines[0]
    assert_is_refused(tmp_path / "dst", begun=want_status == FAILED)


COPIES = {
    "model.embed_tokens.weight": "model.layers.2.embed_tokens.weight",
    "lm_head.weight": "model.layers.2.shared_head.head.weight",
}


@pytest.mark.parametrize("place", ["original", "copy", "both"])
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("threads", [1, 8])
def test_a_value_that_is_not_finite_is_told_rather_than_that_copies_differ_by_it(
    official_fp8, official, convert, tmp_path, name, place, threads
):
    folder, raw, tensors = official_fp8()
    bad = [name] * (place != "copy") + [COPIES[name]] * (place != "original")
    for tensor in bad:
        tensors = with_value(tensors, tensor, (3, 4), np.inf)
    official(raw=raw, tensors=tensors, n_files=3)

    status, _, err = convert("from-hf", folder, tmp_path / "dst", "--threads", threads)

    assert status == FAILED
    assert re.search(rf"safetensors: {bad[0]}\[3, 4\]=inf is not a finite number$", err, re.M), err


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_of_several_faults_the_first_in_the_files_is_told_whatever_the_threads_do(
    official_fp8, official, convert, tmp_path, monkeypatch, threads
):
    folder, raw, tensors = official_fp8()
    for tensor in (name for name in tensors if name.endswith("norm.weight")):
        tensors = with_value(tensors, tensor, 9, np.nan)
    official(raw=raw, tensors=tensors, n_files=3)
    n_read, read_rows = itertools.count(), safetensors_io.read_rows

    def read_late_what_comes_first(*args):
        time.sleep(max(0.0, 0.05 - 0.01 * next(n_read)))
        return read_rows(*args)

    monkeypatch.setattr(safetensors_io, "read_rows", read_late_what_comes_first)

    _, _, err = convert("from-hf", folder, tmp_path / "dst", "--threads", threads)

    first = "model.layers.0.input_layernorm.weight"
    assert re.search(rf"model-00001-of-000003.safetensors: {first}\[9\]=nan is not", err), err


@pytest.mark.parametrize("dtype", ["bf16", "float32"])
def test_products_and_casts_that_overflow_are_named(
    official_fp8, official, convert, tmp_path, dtype
):
    folder, raw, tensors = official_fp8()
    tensors = with_code(with_value(tensors, SCALE, (1, 0), 2.0**120), EXPERT, (130, 7), 0x7E)
    if dtype == "bf16":
        tensors = without(tensors, SCALE)
        wide = np.zeros(tensors[EXPERT].shape, np.float32)
        wide[130, 7] = np.finfo(np.float32).max
        tensors[EXPERT] = wide
    official(raw=raw, tensors=tensors, n_files=3)

    status, _, err = convert("from-hf", folder, tmp_path / "dst", "--dtype", dtype)

    assert status == FAILED
    message = rf"error: .*safetensors: {EXPERT}\[130, 7\], .* is beyond the range of {dtype[:2]}"
    assert re.search(message, err), err


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "model-00002-of-000003.safetensors").unlink(), "missing: .*00002-of-000003"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "config.json lacks the key"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "must hold a weight_map"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[" * 10**5), "hold a weight_map"),
        (lambda f: place_in(f, "../x.safetensors"), "index.json names '../x.safe.*', which is outside"),
        (lambda f: place_in(f, "/x.safetensors"), "index.json names '/x.safe.*', which is outside"),
        (lambda f: cut(f / "model-00003-of-000003.safetensors", 10), "00003-of-000003.*truncated"),
        (lambda f: cut(f / "model-00003-of-000003.safetensors", 0), "00003-of-000003.*not a readable"),
        (lambda f: settings(f, num_hidden_layers=10**9), "too few for .*num_hidden_layers=1000000000"),
        (lambda f: settings(f, n_routed_experts=10**8), "too few for .*n_routed_experts=100000000"),
        (lambda f: settings(f, hidden_size=10**30), "hidden_size=1000000.*000 must be below 2147"),
        (lambda f: settings(f, hidden_size=2**31 - 1), "has shape .*the config asks for .*2147483647"),
        (
            lambda f: settings(f, num_hidden_layers=1, num_nextn_predict_layers=0),
            "does not know, first model.layers.1.input_layernorm.weight in model-0000",
        ),
        (lambda f: quantisation(f, fmt="e5m2"), "quantization_config.fmt='e5m2' is not supported"),
        (lambda f: quantisation(f, weight_block_size=[64, 64]), "weight_block_size=.64, 64. is not"),
    ],
)  # fmt: skip
def test_a_broken_folder_is_refused_before_anything_is_written(
    official_fp8, convert, tmp_path, break_it, message
):
    folder, _, _ = official_fp8()
    break_it(folder)

    status, _, err = convert("from-hf", folder, tmp_path / "dst")

    assert status == WRONG_USAGE
    assert re.search(f"error: .*{message}", err), err
    assert not (tmp_path / "dst").exists()


def cut(path, n_bytes):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - n_bytes] if n_bytes else b"")


def place_in(folder, file):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][EXPERT] = file
    path.write_text(json.dumps(index))


def settings(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def quantisation(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(raw))


def test_what_cannot_fit_is_refused_at_once(official_fp8, convert, tmp_path, monkeypatch):
    folder, _, _ = official_fp8()
    usage = workers.shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(workers.shutil, "disk_usage", lambda path: usage)

    status, _, err = convert("from-hf", folder, tmp_path / "dst")

    assert status == FAILED
    assert "is full: 0.0 GB are to be written, 0.0 GB are free" in err
    assert not (tmp_path / "dst" / "checkpoints").exists()
