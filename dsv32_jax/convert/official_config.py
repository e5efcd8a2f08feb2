"""Write the official config.json, in its old form (rope_scaling), which every loader of these checkpoints reads."""

from collections.abc import Mapping
from typing import Any

from dsv32_jax.config import ModelConfig, YarnConfig
from dsv32_jax.convert import hf_config
from dsv32_jax.convert.slots import StoredDtype
from dsv32_jax.tokenizer import Tokenizer

# What an official config.json says besides the architecture. Source: deepseek-ai/DeepSeek-V3.2 config.json.
CONSTANTS: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "hidden_act": "silu",
    "model_type": "deepseek_v32",
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "transformers_version": "4.44.2",
    "use_cache": True,
}
QUANTISATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
TORCH_DTYPES = {"fp8": "bfloat16", "bf16": "bfloat16", "float32": "float32"}


def official_config(
    cfg: ModelConfig,
    dtype: StoredDtype,
    base: Mapping[str, Any] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    keep_quantisation: bool = False,
    power_of_two: bool = True,
) -> dict[str, Any]:
    """Translate a model's config to the official keys.

    Args:
        cfg: The model.
        dtype: Of the exported weights.
        base: The config.json that the checkpoint was converted from; keys that say nothing of the architecture are
            kept as they are there. None for a model trained from scratch.
        tokenizer: That of a model without a base; None where it is not known.
        keep_quantisation: Keep the base's quantization_config, whose scales the export repeats.
        power_of_two: Whether all scales of the export are powers of two.

    Returns:
        The content of config.json.
    """
    raw: dict[str, Any] = (CONSTANTS if base is None else dict(base)) | _sizes(cfg)
    if base is None:
        raw["max_position_embeddings"] = round(cfg.rope.factor * cfg.rope.original_len)
        # Null where they are not known: left out, transformers takes DeepSeek's own, 0 and 1.
        raw["bos_token_id"] = tokenizer.bos_id if tokenizer else None
        raw["eos_token_id"] = tokenizer.eos_id if tokenizer else None
        raw |= _rope(cfg.rope)
    elif hf_config.parse_rope(dict(base)) != cfg.rope:
        raw.pop("rope_parameters", None)
        raw |= _rope(cfg.rope)
    for key in ("torch_dtype", "dtype"):
        if base is None or key in base:
            raw["torch_dtype" if base is None else key] = TORCH_DTYPES[dtype]
    quantisation = raw.pop("quantization_config", None)
    if dtype == "fp8":
        kept = quantisation if keep_quantisation else None
        raw["quantization_config"] = dict(kept or QUANTISATION)
        if not power_of_two:
            raw["quantization_config"].pop("scale_fmt", None)
    return raw


def _sizes(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "first_k_dense_replace": cfg.n_dense_layers,
        "hidden_size": cfg.dim,
        "index_head_dim": cfg.indexer.head_dim,
        "index_n_heads": cfg.indexer.n_heads,
        "index_topk": cfg.indexer.topk,
        "initializer_range": cfg.init_std,
        "intermediate_size": cfg.ffn_dim,
        "kv_lora_rank": cfg.mla.kv_lora_rank,
        "moe_intermediate_size": cfg.moe.expert_dim,
        "n_group": cfg.moe.n_groups,
        "n_routed_experts": cfg.moe.n_experts,
        "n_shared_experts": cfg.moe.n_shared,
        "norm_topk_prob": cfg.moe.normalize_gates,
        "num_attention_heads": cfg.mla.n_heads,
        "num_experts_per_tok": cfg.moe.n_active,
        "num_hidden_layers": cfg.n_layers,
        "num_key_value_heads": cfg.mla.n_heads,
        "num_nextn_predict_layers": int(cfg.mtp),
        "q_lora_rank": cfg.mla.q_lora_rank,
        "qk_nope_head_dim": cfg.mla.nope_dim,
        "qk_rope_head_dim": cfg.mla.rope_dim,
        "rms_norm_eps": cfg.norm_eps,
        "routed_scaling_factor": cfg.moe.route_scale,
        "topk_group": cfg.moe.n_active_groups,
        "v_head_dim": cfg.mla.v_dim,
        "vocab_size": cfg.vocab_size,
    }


def _rope(rope: YarnConfig) -> dict[str, Any]:
    if rope.factor == 1:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling = {
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "factor": rope.factor,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
        "original_max_position_embeddings": rope.original_len,
        "type": "yarn",
    }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
