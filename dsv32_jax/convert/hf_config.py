"""Read the official config.json, in its old form (rope_scaling) and its new one (rope_parameters)."""

import json
from pathlib import Path
from typing import Any

from dsv32_jax.config import IndexerConfig, MLAConfig, ModelConfig, MoEConfig, YarnConfig

REQUIRED_VALUES = {
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


def read_config(folder: Path) -> ModelConfig:
    """Read a checkpoint's architecture.

    Args:
        folder: Holds config.json.

    Returns:
        The model, float32, with Hadamard where the indexer's head_dim is a power of two and no FP8 rounding.

    Raises:
        FileNotFoundError: If there is no config.json.
        ValueError: If it is not JSON, lacks a key, or asks for what this model does not have.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    try:
        return parse_config(raw)
    except KeyError as error:
        raise ValueError(f"{path} lacks the key {error}") from error


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Translate the official keys.

    Args:
        raw: Parsed config.json.

    Returns:
        The model.

    Raises:
        KeyError: If a key is missing.
        ValueError: If a value asks for what this model does not have.
    """
    for key, value in REQUIRED_VALUES.items():
        if raw.get(key, value) != value:
            raise ValueError(f"config.json {key}={raw[key]!r} is not supported, only {value!r}")
    n_layers = raw["num_hidden_layers"]
    head_dim = raw["index_head_dim"]
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        dim=raw["hidden_size"],
        n_layers=n_layers,
        n_dense_layers=_dense_layers(raw, n_layers),
        ffn_dim=raw["intermediate_size"],
        mla=MLAConfig(
            n_heads=raw["num_attention_heads"],
            q_lora_rank=raw["q_lora_rank"],
            kv_lora_rank=raw["kv_lora_rank"],
            nope_dim=raw["qk_nope_head_dim"],
            rope_dim=raw["qk_rope_head_dim"],
            v_dim=raw["v_head_dim"],
        ),
        indexer=IndexerConfig(
            n_heads=raw["index_n_heads"],
            head_dim=head_dim,
            topk=raw["index_topk"],
            hadamard=head_dim & (head_dim - 1) == 0,
        ),
        moe=MoEConfig(
            n_experts=raw["n_routed_experts"],
            n_active=raw["num_experts_per_tok"],
            n_groups=raw["n_group"],
            n_active_groups=raw["topk_group"],
            expert_dim=raw["moe_intermediate_size"],
            n_shared=raw["n_shared_experts"],
            route_scale=raw["routed_scaling_factor"],
            normalize_gates=raw.get("norm_topk_prob", True),
        ),
        rope=parse_rope(raw),
        mtp=raw.get("num_nextn_predict_layers", 0) > 0,
        norm_eps=raw["rms_norm_eps"],
        init_std=raw.get("initializer_range", 0.02),
    )


def _dense_layers(raw: dict[str, Any], n_layers: int) -> int:
    """Count the leading plain layers; `mlp_layer_types`, where given, must say the same."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return min(raw["first_k_dense_replace"], n_layers)
    n_dense = kinds.count("dense")
    if list(kinds) != ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense):
        raise ValueError(
            f"config.json mlp_layer_types={kinds} must be dense layers, then sparse ones"
        )
    return n_dense


def parse_rope(raw: dict[str, Any]) -> YarnConfig:
    """Translate `rope_parameters` or `rope_scaling` with `rope_theta`.

    Args:
        raw: Parsed config.json.

    Returns:
        Frequencies' settings; factor 1 where no scaling is given.

    Raises:
        KeyError: If YaRN lacks its factor or original length.
        ValueError: If the scaling is of another kind.
    """
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return YarnConfig(theta=theta, factor=1.0)
    if kind != "yarn":
        raise ValueError(
            f"config.json rope type {kind!r} is not supported, only 'yarn' and 'default'"
        )
    for key, value in {
        "attention_factor": None,
        "truncate": True,
        "partial_rotary_factor": 1.0,
    }.items():
        if scaling.get(key, value) != value:
            raise ValueError(
                f"config.json rope {key}={scaling[key]!r} is not supported, only {value!r}"
            )
    original = scaling["original_max_position_embeddings"]
    factor = scaling["factor"]
    return YarnConfig(
        theta=theta,
        factor=raw["max_position_embeddings"] / original if factor is None else factor,
        original_len=original,
        beta_fast=scaling.get("beta_fast") or 32.0,
        beta_slow=scaling.get("beta_slow") or 1.0,
        mscale=scaling.get("mscale") or 0.0,
        mscale_all_dim=scaling.get("mscale_all_dim") or 0.0,
    )
