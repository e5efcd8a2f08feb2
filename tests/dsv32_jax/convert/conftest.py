import dataclasses
import json
import math

import ml_dtypes
import numpy as np
import pytest

from dsv32_jax import config, load_model, parameters
from dsv32_jax.convert import __main__ as convert_command
from train import checkpoint

# Widths that are no multiples of 128, several blocks in most matrices, and edges.
CFG = dataclasses.replace(
    config.tiny(),
    dim=160,
    ffn_dim=264,
    n_layers=2,
    n_dense_layers=1,
    mla=config.MLAConfig(
        n_heads=2, q_lora_rank=136, kv_lora_rank=24, nope_dim=64, rope_dim=16, v_dim=72
    ),
    indexer=config.IndexerConfig(n_heads=4, head_dim=64, topk=8),
    moe=config.MoEConfig(n_experts=4, n_active=2, n_groups=2, n_active_groups=2, expert_dim=136),
)
NEVER_QUANTISED = (
    "embed_tokens.weight", "lm_head.weight", "norm.weight", "norm.bias", "mlp.gate.weight", "e_score_correction_bias",
    "weights_proj.weight", "eh_proj.weight", "shared_head.head.weight",
)  # fmt: skip
FP8_LAYOUTS: dict = {}  # config and tensors by model: quantising takes longer than most tests
FLOAT32 = ("norm.weight", "norm.bias", "e_score_correction_bias")
QUANTISATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def quantise_by_blocks(x, extra=0):
    """Quantise one block after the other; doublings make each scale another, and larger than need be."""
    rows, columns = (math.ceil(n / 128) for n in x.shape)
    q = np.zeros(x.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            doublings = (i + 2 * j + extra) % 3
            scales[i, j] = 2.0 ** (math.ceil(math.log2(np.abs(x[at]).max() / 448)) + doublings)
            q[at] = (x[at] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
    return q, scales


def dequantise(tensors):
    """Return all weights as float32, FP8 ones times their scales."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        wide = tensor.astype(np.float32)
        scales = tensors.get(f"{name}_scale_inv")
        if scales is not None:
            spread = np.kron(scales, np.ones((128, 128), np.float32))
            wide = wide * spread[: wide.shape[0], : wide.shape[1]]
        out[name] = wide
    return out


def to_fp8_layout(tensors):
    out = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if name.endswith(FLOAT32):
            out[name] = tensor
        elif name.endswith(NEVER_QUANTISED):
            out[name] = tensor.astype(ml_dtypes.bfloat16)
        else:
            out[name], out[f"{name}_scale_inv"] = quantise_by_blocks(tensor, extra=number % 3)
    return out


@pytest.fixture
def official_fp8(official, draw):
    """Write a model in the FP8 layout over several files, scales in other files than their weights."""

    def write(cfg=CFG, *, n_files=3, name="official"):
        if cfg not in FP8_LAYOUTS:
            _, raw, tensors = official(cfg, draw(cfg), name="unquantised")
            FP8_LAYOUTS[cfg] = raw, to_fp8_layout(tensors)
        raw, tensors = FP8_LAYOUTS[cfg]
        raw = raw | {"quantization_config": dict(QUANTISATION)}
        folder, raw, tensors = official(raw=raw, tensors=dict(tensors), n_files=n_files, name=name)
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
        (folder / "encoding").mkdir(exist_ok=True)
        (folder / "encoding" / "readme.txt").write_text("how to encode")
        return folder, raw, tensors

    return write


def read_folder(folder):
    """Read all tensors of an official folder as (dtype, shape, bytes), without the code under test."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        n = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8 : 8 + n]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                data = content[8 + n + begin : 8 + n + end]
                tensors[name] = (entry["dtype"], tuple(entry["shape"]), data)
    return tensors


@pytest.fixture
def dequantised():
    return dequantise


@pytest.fixture
def read_official():
    return read_folder


@pytest.fixture
def convert(capsys):
    """Run the command; return its exit status, what it printed and what it complained about."""

    def run(*args):
        status = convert_command.main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def assert_holds():
    """Return a check that a folder holds an official folder's weights."""
    return lambda folder, tensors: compare(folder, dequantise(tensors))


def compare(folder, wide):
    """Compare some tensors of every kind, and the sum of all."""
    model = load_model.load_model(folder)
    arrays = {k: np.asarray(v) for group in parameters.flatten(model) for k, v in group.items()}
    places = {
        "model.embed_tokens.weight": ("embed", ()),
        "lm_head.weight": ("head", ()),
        "model.layers.0.self_attn.q_b_proj.weight": ("dense_layers.attn.wq_b", (0,)),
        "model.layers.0.self_attn.kv_b_proj.weight": ("dense_layers.attn.wkv_b", (0,)),
        "model.layers.0.self_attn.o_proj.weight": ("dense_layers.attn.wo", (0,)),
        "model.layers.0.mlp.down_proj.weight": ("dense_layers.ffn.w2", (0,)),
        "model.layers.1.self_attn.indexer.wq_b.weight": ("moe_layers.attn.indexer.wq_b", (0,)),
        "model.layers.1.mlp.gate.weight": ("moe_layers.moe.gate.weight", (0,)),
        "model.layers.1.mlp.gate.e_score_correction_bias": ("moe_layers.moe.gate.bias", (0,)),
        "model.layers.1.mlp.shared_experts.up_proj.weight": ("moe_layers.moe.shared.w3", (0,)),
        "model.layers.1.mlp.experts.2.down_proj.weight": ("moe_layers.moe.w2", (0, 2)),
        "model.layers.2.mlp.experts.0.up_proj.weight": ("mtp.block.moe.w3", (0,)),
        "model.layers.2.eh_proj.weight": ("mtp.eh_proj", ()),
        "model.layers.2.shared_head.norm.weight": ("mtp.norm.weight", ()),
    }
    for name, (path, at) in places.items():
        if name in wide:
            want = wide[name] if path == "embed" or wide[name].ndim == 1 else wide[name].T
            have = arrays[path][at]
            np.testing.assert_array_equal(have, want.reshape(have.shape), err_msg=name)
    copies = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
    total = sum(wide[name].astype(np.float64).sum() for name in wide if name not in copies)
    assert sum(x.astype(np.float64).sum() for x in arrays.values()) == pytest.approx(total)
    return model


@pytest.fixture
def assert_is_refused():
    """Return a check that neither a loader nor a training run takes a folder for a checkpoint."""
    return refused


def refused(folder, *, begun=True):
    if not begun:
        assert not folder.exists()
        return
    with pytest.raises(Exception, match=r"is whole \(0: manifest\.json is missing"):
        load_model.load_model(folder)
    settings = checkpoint.CheckpointConfig()
    with pytest.raises(checkpoint.CheckpointError, match=r"manifest\.json is missing"):
        checkpoint.Checkpoints(folder / "checkpoints", settings).newest_meta()
