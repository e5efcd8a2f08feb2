"""DSV32_PARITY_DATA names the folder with reference data; ../shared/data/parity beside the checkout by default.

DSV32_REFERENCE_PYTHON names a Python with torch and transformers >= 5.11, which here is a program like any other: it
reads official folders and writes logits.
"""

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dsv32_jax import check_logits

PARITY = Path(
    os.environ.get("DSV32_PARITY_DATA") or Path(__file__).parents[4] / "shared" / "data" / "parity"
)
BLOCKS, SMALL = PARITY / "blocks_fp8", PARITY / "small_fp32"
REFERENCE_PYTHON = os.environ.get("DSV32_REFERENCE_PYTHON")
ATOL = 1e-4  # rounding of float32; a wrong block or transposed weight changes logits by tenths
AGREES = 0

needs_data = pytest.mark.skipif(not BLOCKS.is_dir(), reason=f"no reference data in {PARITY}")
needs_reference = pytest.mark.skipif(
    not REFERENCE_PYTHON, reason="DSV32_REFERENCE_PYTHON does not name a Python with transformers"
)

RUN_REFERENCE = """
import sys
import numpy as np, torch
from transformers import AutoModelForCausalLM
tokens = torch.tensor(np.load(sys.argv[2])["tokens"]).long()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="eager").eval()
assert type(model).__name__ == "DeepseekV32ForCausalLM"
with torch.no_grad():
    out = model(tokens, output_hidden_states=True)
hidden = np.stack([h.numpy() for h in out.hidden_states])
np.savez(sys.argv[3], tokens=tokens.numpy().astype(np.int32), logits=out.logits.numpy(), hidden=hidden)
"""


def reference_logits(folder, tokens, target):
    """Run transformers on an official folder in float32; return the file with its logits."""
    command = [REFERENCE_PYTHON, "-c", RUN_REFERENCE, folder, tokens, target]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "MISSING" not in done.stderr
    return target


def worst_errors(capsys, checkpoint, reference):
    """Run check_logits; return its status and the largest error of each line."""
    status = check_logits.main([str(checkpoint), str(reference)])
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "max" in line]
    return status, [float(re.search(r"max ([^ ,]+),", line)[1]) for line in lines]


@needs_data
@pytest.mark.parametrize("dtype", ["fp8", "bf16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_stored_reference_is_met_up_to_its_first_experts(convert, capsys, tmp_path, dtype):
    assert convert("from-hf", BLOCKS, tmp_path / "dst", "--dtype", dtype)[0] == 0

    _, worst = worst_errors(capsys, tmp_path / "dst", BLOCKS / "reference.npz")

    # Logits, KL, embedding, layers. From layer 1 on the stored reference has other weights than the files: they hold
    # shared_experts.down_proj rounded to FP8, it was computed with the unrounded one. The next test covers the rest.
    embedding, layer_0 = worst[2:4]
    assert embedding == 0
    assert layer_0 <= ATOL


@needs_data
@needs_reference
def test_fp8_weights_give_the_logits_of_transformers_by_every_way(convert, capsys, tmp_path):
    convert("from-hf", BLOCKS, tmp_path / "fp8", "--dtype", "fp8")
    convert("from-hf", BLOCKS, tmp_path / "bf16", "--dtype", "bf16")
    convert("to-hf", tmp_path / "bf16", tmp_path / "wide", "--dtype", "float32")
    reference = reference_logits(
        tmp_path / "wide", BLOCKS / "reference.npz", tmp_path / "reference.npz"
    )

    for checkpoint in (tmp_path / "fp8", tmp_path / "bf16", BLOCKS):
        status, worst = worst_errors(capsys, checkpoint, reference)
        assert status == AGREES
        assert len(worst) == 2 + 4
        assert max(worst) <= ATOL


@needs_data
def test_float32_weights_keep_the_reference_logits(convert, capsys, tmp_path):
    assert convert("from-hf", SMALL, tmp_path / "dst")[0] == 0

    status, worst = worst_errors(capsys, tmp_path / "dst", SMALL / "reference.npz")

    assert (status, max(worst) <= ATOL) == (AGREES, True)


@needs_data
@needs_reference
def test_transformers_reads_the_export_as_it_reads_the_source(convert, tmp_path):
    convert("from-hf", SMALL, tmp_path / "middle")
    convert("to-hf", tmp_path / "middle", tmp_path / "back", "--shard-gb", "0.0005")

    got = np.load(reference_logits(tmp_path / "back", SMALL / "reference.npz", tmp_path / "a.npz"))
    want = np.load(reference_logits(SMALL, SMALL / "reference.npz", tmp_path / "b.npz"))

    np.testing.assert_array_equal(got["logits"], want["logits"])


@needs_data
@needs_reference
def test_transformers_reads_a_bf16_export(convert, tmp_path):
    convert("from-hf", BLOCKS, tmp_path / "fp8")
    convert("to-hf", tmp_path / "fp8", tmp_path / "bf16", "--dtype", "bf16")
    convert("to-hf", tmp_path / "fp8", tmp_path / "wide", "--dtype", "float32")
    tokens = BLOCKS / "reference.npz"

    got = np.load(reference_logits(tmp_path / "bf16", tokens, tmp_path / "a.npz"))
    want = np.load(reference_logits(tmp_path / "wide", tokens, tmp_path / "b.npz"))

    np.testing.assert_array_equal(got["logits"], want["logits"])
