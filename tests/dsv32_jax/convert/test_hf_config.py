import dataclasses
import json
import math
import re

import pytest

from dsv32_jax import config
from dsv32_jax.config import YarnConfig
from dsv32_jax.convert.hf_config import (
    add_indexer,
    parse_config,
    parse_rope,
    read_config,
    scale_format,
)
from dsv32_jax.convert.official_config import official_config
from dsv32_jax.tokenizer import ByteTokenizer

YARN = {
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# The released config.json, DeepSeek-V3.2.
RELEASED = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v32",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "yarn", **YARN},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_released_config_is_the_released_model():
    want = dataclasses.replace(
        config.v32_671b(), init_std=0.02, dtype="float32", remat="none"
    )  # the file's initializer_range is not what the report trained with

    assert parse_config(RELEASED) == want


def test_each_size_comes_from_its_own_key():
    sizes = {key: value for key, value in RELEASED.items() if type(value) is int}
    ignored = {
        "bos_token_id", "eos_token_id", "ep_size", "max_position_embeddings", "moe_layer_freq",
        "num_key_value_heads", "rope_theta",
    }  # fmt: skip
    base = parse_config(RELEASED)
    seen = set()
    base_raw = {key: value for key, value in RELEASED.items() if key != "num_key_value_heads"}
    for key in sizes.keys() - ignored - {"num_nextn_predict_layers"}:
        changed = parse_config(base_raw | {key: sizes[key] * (1 if key == "n_group" else 2) // 1}
                               | ({"n_group": 4} if key == "n_group" else {}))  # fmt: skip
        assert changed != base, key
        seen.add(repr(changed))
    assert len(seen) == len(sizes) - len(ignored) - 1


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 500, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 500, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500, **YARN}},
        {"rope_parameters": {"rope_type": "yarn", **YARN}, "rope_theta": 500},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **YARN, "truncate": True}},
    ],
)
def test_old_and_new_forms_of_the_rotation_are_the_same(form):
    assert parse_rope(form) == YarnConfig(
        theta=500.0, factor=40.0, original_len=4096, beta_fast=32.0, beta_slow=1.0,
        mscale=1.0, mscale_all_dim=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 500},
        {"rope_theta": 500, "rope_scaling": None},
        {"rope_theta": 500, "rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
)
def test_no_scaling_is_plain_rotation(form):
    rope = parse_rope(form)

    assert (rope.theta, rope.factor, rope.amplitude, rope.softmax_factor) == (500.0, 1.0, 1.0, 1.0)


def test_mscales_that_are_not_given_are_told_from_those_that_are_one():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

    rope = parse_rope({"rope_scaling": scaling | {"beta_fast": None}})

    assert (rope.theta, rope.beta_fast, rope.beta_slow) == (10000.0, 32.0, 1.0)
    assert (rope.mscale, rope.mscale_all_dim) == (0.0, 0.0)
    assert rope.softmax_factor == 1.0
    assert rope.amplitude == pytest.approx(1.1386294361)  # 0.1 ln 4 + 1


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings"])
def test_yarn_needs_its_sizes(key):
    scaling = {name: value for name, value in YARN.items() if name != key}

    with pytest.raises(KeyError, match=key):
        parse_rope({"rope_scaling": {"type": "yarn", **scaling}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type='deepseek_v3' is not supported, only 'deepsee"),
        ({"attention_bias": True}, "attention_bias=True is not supported, only False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method='greedy' is not supported, only 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported, only 1"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' is not supported"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' must be an object"),
        ({"rope_parameters": []}, "rope_parameters=[] must be an object"),
        ({"rope_parameters": {"full_attention": YARN}}, "rope_parameters.full_attention is not"),
        ({"rope_parameters": YARN}, "rope_parameters has a factor and no rope_type"),
        ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "factor=0.5 is not"),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": math.inf}},
            "beta_fast=inf must be",
        ),
        ({"norm_topk_prob": [1]}, "norm_topk_prob=[1] must be true or false"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan must be a finite number"),
        ({"rms_norm_eps": 0}, "norm_eps=0.0 must be positive"),
        ({"routed_scaling_factor": math.inf}, "routed_scaling_factor=inf must be a finite number"),
        ({"routed_scaling_factor": 10**400}, "must be a finite number"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 must equal num_attention_heads=128"),
        ({"mlp_layer_types": 5}, "mlp_layer_types=5 must be dense layers, then sparse ones"),
        (
            {"mlp_layer_types": ["dense"] * 4 + ["sparse"] * 57},
            "first_k_dense_replace=3 must be the 4 dense layers of mlp_layer_types",
        ),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": False}}, "rope truncate=False is"),
        ({"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 2}}, "attention_factor=2"),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": "40"}}, "factor='40' must be a num"),
        ({"q_lora_rank": None}, "q_lora_rank=None must be a whole number"),
        ({"hidden_size": "7168"}, "hidden_size='7168' must be a whole number"),
        ({"n_routed_experts": 256.0}, "n_routed_experts=256.0 must be a whole number"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor=None must be a number"),
        ({"rms_norm_eps": True}, "rms_norm_eps=True must be a number"),
        ({"n_group": 7}, "n_groups=7 must divide n_experts=256"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "must be dense layers, then sparse ones"),
    ],
)
def test_what_this_model_does_not_have_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_config(RELEASED | change)


def test_layer_kinds_may_be_listed_instead_of_counted():
    kinds = ["dense"] * 5 + ["sparse"] * 56
    raw = {key: value for key, value in RELEASED.items() if key != "first_k_dense_replace"}

    assert parse_config(raw | {"mlp_layer_types": kinds}).n_dense_layers == 5


def test_more_dense_layers_than_layers_are_all_of_them():
    raw = RELEASED | {"num_hidden_layers": 2}

    assert parse_config(raw).n_dense_layers == 2


def test_hadamard_is_left_out_where_the_dim_is_no_power_of_two():
    assert parse_config(RELEASED).indexer.hadamard
    assert not parse_config(RELEASED | {"index_head_dim": 96}).indexer.hadamard


@pytest.mark.parametrize(("count", "mtp"), [(0, False), (1, True), (None, False)])
def test_the_mtp_layer_is_there_if_it_is_declared(count, mtp):
    assert parse_config(RELEASED | {"num_nextn_predict_layers": count}).mtp == mtp


def test_a_file_is_read_or_named(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        read_config(tmp_path)

    path.write_text(json.dumps(RELEASED))
    assert read_config(tmp_path) == parse_config(RELEASED)

    for key in ("model_type", "hidden_size", "index_topk", "first_k_dense_replace"):
        path.write_text(json.dumps({k: v for k, v in RELEASED.items() if k != key}))
        with pytest.raises(ValueError, match=rf"config\.json lacks the key '{key}'"):
            read_config(tmp_path)

    for text, message in [
        ("{", "is not JSON"), ("[]", "must hold an object"), ('{"x":' * 100_000, "is not JSON: .*recursion"),
        ('{"x":' * 999 + "1" + "}" * 999, "is nested too deeply"),
    ]:  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not JSON"):
        read_config(tmp_path)


def test_a_v3_config_becomes_that_of_a_v32_model_of_the_same_sizes():
    v3 = {key: value for key, value in RELEASED.items() if not key.startswith("index_")}
    v3 |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {}}

    raw = add_indexer(v3, n_heads=64, head_dim=128, topk=2048)

    assert raw == RELEASED
    assert parse_config(raw) == parse_config(RELEASED)


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        (None, None),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, None),  # V3
        ({"quant_method": "fp8", "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}, "ue8m0"),
    ],
)
def test_only_ue8m0_promises_powers_of_two(quantisation, expected):
    assert scale_format({"quantization_config": quantisation}) == expected


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq' is not supported, only 'fp8'"),
        ({"fmt": "e5m2"}, "fmt='e5m2' is not"),
        ({"weight_block_size": [1, 128]}, r"weight_block_size=\[1, 128\] is not"),
        ({"scale_fmt": "float"}, "scale_fmt='float' is not"),
        ("fp8", "quantization_config='fp8' must be an object"),
    ],
)
def test_another_quantisation_is_refused_by_name(quantisation, message):
    with pytest.raises(ValueError, match=message):
        scale_format({"quantization_config": quantisation})


# Of the released config.json, what says nothing of the architecture.
OTHER_KEYS = {
    "ep_size": 1,
    "transformers_version": "4.44.2",
    "use_cache": True,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}


def test_the_released_models_config_is_written_as_released():
    cfg = dataclasses.replace(config.v32_671b(), init_std=0.02)

    raw = official_config(cfg, "fp8")

    # Its tokens are not known here, and 0 and 1 would be another tokenizer's.
    assert raw == RELEASED | OTHER_KEYS | {"bos_token_id": None, "eos_token_id": None}


def test_the_tokens_that_open_and_end_a_text_are_the_tokenizers():
    raw = official_config(config.tiny(), "bf16", tokenizer=ByteTokenizer())

    assert (raw["bos_token_id"], raw["eos_token_id"]) == (256, 257)


@pytest.mark.parametrize("name", sorted(config.PRESETS))
def test_every_preset_survives_the_official_keys(name):
    cfg = config.PRESETS[name]()

    got = parse_config(official_config(cfg, "bf16"))

    assert got == dataclasses.replace(
        cfg, dtype="float32", remat="none", scan_unroll=1, indexer=got.indexer
    )
    assert dataclasses.replace(got.indexer, hadamard=cfg.indexer.hadamard) == cfg.indexer


def test_unscaled_rotation_is_written_without_scaling():
    cfg = dataclasses.replace(config.tiny(), rope=YarnConfig(theta=500.0, factor=1.0))

    raw = official_config(cfg, "float32")

    assert raw["rope_scaling"] is None
    assert parse_rope(raw).factor == 1
    assert raw["torch_dtype"] == "float32"


def test_keys_of_the_source_are_kept_and_those_of_the_architecture_follow_the_model():
    cfg = dataclasses.replace(parse_config(RELEASED), rope=YarnConfig(factor=2.0, original_len=8))
    base = RELEASED | {"eos_token_id": 77, "x": "y", "hidden_size": 1, "rope_parameters": {}}

    raw = official_config(cfg, "bf16", base)

    assert (raw["eos_token_id"], raw["x"], raw["hidden_size"]) == (77, "y", 7168)
    assert parse_config(raw) == cfg
    assert "quantization_config" not in raw


def test_a_v3_quantisation_is_kept_only_where_its_scales_are():
    plain = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    base = RELEASED | {"quantization_config": plain}
    cfg = parse_config(RELEASED)

    kept = official_config(cfg, "fp8", base, keep_quantisation=True)
    made = official_config(cfg, "fp8", base)

    assert kept["quantization_config"] == plain
    assert made["quantization_config"]["scale_fmt"] == "ue8m0"
