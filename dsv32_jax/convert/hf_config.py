"""Read the official config.json, in its old form (rope_scaling) and its new one (rope_parameters)."""

import json
import math
import os
import reprlib
from typing import Any, Literal, cast

from etils import epath

from dsv32_jax import json_files
from dsv32_jax.config import IndexerConfig, MLAConfig, ModelConfig, MoEConfig, YarnConfig

REQUIRED_VALUES = {
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
MAX_SIZE = 2**31
V3 = "deepseek_v3"
V3_ONLY = ("auto_map",)  # names DeepSeek-V3's own code
REQUIRED_QUANTISATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
}
ROPE_KEYS = frozenset(
    (
        "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "attention_factor", "truncate", "partial_rotary_factor",
    )
)  # fmt: skip
REQUIRED_ROPE_VALUES = {"attention_factor": None, "truncate": True, "partial_rotary_factor": 1.0}


def read_config(folder: str | os.PathLike) -> ModelConfig:
    """Read a checkpoint's architecture.

    Args:
        folder: Holds config.json; local or in a bucket.

    Returns:
        The model, float32, with Hadamard where the indexer's head_dim is a power of two and no FP8 rounding.

    Raises:
        FileNotFoundError: If there is no config.json.
        ValueError: If it is not JSON, lacks a key, or asks for what this model does not have.
    """
    return parse_named(read_raw(folder), folder)


def parse_named(raw: dict[str, Any], folder: str | os.PathLike) -> ModelConfig:
    """Translate the official keys; an error names the folder.

    Args:
        raw: Parsed config.json.
        folder: Where it is from.

    Returns:
        The model.

    Raises:
        ValueError: If it lacks a key, or asks for what this model does not have.
    """
    try:
        return parse_config(raw)
    except KeyError as error:
        path = epath.Path(folder) / "config.json"
        raise ValueError(f"{path} lacks the key {error}") from error


def read_raw(folder: str | os.PathLike) -> dict[str, Any]:
    """Read a folder's config.json.

    Args:
        folder: Holds config.json; local or in a bucket.

    Returns:
        The parsed object.

    Raises:
        FileNotFoundError: If there is no config.json.
        ValueError: If it is not JSON, no object, or nested too deeply to be written again.
    """
    path = epath.Path(folder) / "config.json"
    raw = json_files.read_object(path)
    try:
        json.dumps(raw, indent=2)
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    return raw


def add_indexer(raw: dict[str, Any], *, n_heads: int, head_dim: int, topk: int) -> dict[str, Any]:
    """Turn DeepSeek-V3's config into that of a V3.2 model with the same sizes.

    Args:
        raw: Parsed config.json of model_type deepseek_v3.
        n_heads: Indexer heads.
        head_dim: Dims of each.
        topk: Keys each query attends to.

    Returns:
        The official keys of V3.2.
    """
    kept = {key: value for key, value in raw.items() if key not in V3_ONLY}
    return kept | {
        "model_type": REQUIRED_VALUES["model_type"],
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_n_heads": n_heads,
        "index_head_dim": head_dim,
        "index_topk": topk,
    }


def scale_format(raw: dict[str, Any]) -> Literal["ue8m0"] | None:
    """Return what the config promises about FP8 scales.

    Args:
        raw: Parsed config.json.

    Returns:
        "ue8m0" for powers of two, None for any positive number, as in DeepSeek-V3, or where there is no quantisation.

    Raises:
        ValueError: If the quantisation is of another kind.
    """
    quantisation = raw.get("quantization_config")
    if quantisation is None:
        return None
    if not isinstance(quantisation, dict):
        raise ValueError(
            f"config.json quantization_config={_shown(quantisation)} must be an object"
        )
    for key, value in REQUIRED_QUANTISATION.items():
        if quantisation.get(key, value) != value:
            raise ValueError(
                f"config.json quantization_config.{key}={_shown(quantisation[key])} is not supported, only {value!r}"
            )
    return cast(Literal["ue8m0"] | None, quantisation.get("scale_fmt"))


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
    raw["model_type"]  # the one key of these that must be there: by it an official folder is known
    for key, value in REQUIRED_VALUES.items():
        if raw.get(key, value) != value:
            raise ValueError(
                f"config.json {key}={_shown(raw[key])} is not supported, only {value!r}"
            )
    _check_key_value_heads(raw)
    n_layers = _whole(raw, "num_hidden_layers")
    head_dim = _whole(raw, "index_head_dim")
    return ModelConfig(
        vocab_size=_whole(raw, "vocab_size"),
        dim=_whole(raw, "hidden_size"),
        n_layers=n_layers,
        n_dense_layers=_dense_layers(raw, n_layers),
        ffn_dim=_whole(raw, "intermediate_size"),
        mla=MLAConfig(
            n_heads=_whole(raw, "num_attention_heads"),
            q_lora_rank=_whole(raw, "q_lora_rank"),
            kv_lora_rank=_whole(raw, "kv_lora_rank"),
            nope_dim=_whole(raw, "qk_nope_head_dim"),
            rope_dim=_whole(raw, "qk_rope_head_dim"),
            v_dim=_whole(raw, "v_head_dim"),
        ),
        indexer=IndexerConfig(
            n_heads=_whole(raw, "index_n_heads"),
            head_dim=head_dim,
            topk=_whole(raw, "index_topk"),
            hadamard=head_dim & (head_dim - 1) == 0,
        ),
        moe=MoEConfig(
            n_experts=_whole(raw, "n_routed_experts"),
            n_active=_whole(raw, "num_experts_per_tok"),
            n_groups=_whole(raw, "n_group"),
            n_active_groups=_whole(raw, "topk_group"),
            expert_dim=_whole(raw, "moe_intermediate_size"),
            n_shared=_whole(raw, "n_shared_experts"),
            route_scale=_number(raw, "routed_scaling_factor"),
            normalize_gates=_flag(raw, "norm_topk_prob", default=True),
        ),
        rope=parse_rope(raw),
        mtp=_number(raw, "num_nextn_predict_layers", 0.0) > 0,
        norm_eps=_number(raw, "rms_norm_eps"),
        init_std=_number(raw, "initializer_range", 0.02),
    )


def _shown(value: Any) -> str:
    """Return a value as it can stand in a message, cut where it is long."""
    return reprlib.repr(value)


def _whole(raw: dict[str, Any], key: str) -> int:
    value = raw[key]
    if type(value) is not int:
        raise ValueError(f"config.json {key}={_shown(value)} must be a whole number")
    if abs(value) >= MAX_SIZE:
        raise ValueError(f"config.json {key}={_shown(value)} must be below {MAX_SIZE}")
    return value


def _flag(raw: dict[str, Any], key: str, *, default: bool) -> bool:
    value = raw.get(key, default)
    if type(value) is not bool:
        raise ValueError(f"config.json {key}={_shown(value)} must be true or false")
    return value


def _number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    """Return a finite number; with a default, a key that is missing or null stands for it."""
    if default is not None and raw.get(key) is None:
        return default
    value: Any = raw[key]
    if type(value) not in (int, float):
        raise ValueError(f"config.json {key}={_shown(value)} must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"config.json {key}={_shown(value)} must be a finite number")
    return number


def _check_key_value_heads(raw: dict[str, Any]) -> None:
    """Refuse grouped queries: each head has its own keys and values, expanded from the latent."""
    count, n_heads = raw.get("num_key_value_heads"), raw["num_attention_heads"]
    if count not in (None, n_heads):
        raise ValueError(
            f"config.json num_key_value_heads={_shown(count)} must equal "
            f"num_attention_heads={_shown(n_heads)}"
        )


def _dense_layers(raw: dict[str, Any], n_layers: int) -> int:
    """Count the leading plain layers; where both `mlp_layer_types` and the count are given, they must say the same."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return min(_whole(raw, "first_k_dense_replace"), n_layers)
    n_dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense):
        raise ValueError(
            f"config.json mlp_layer_types={_shown(kinds)} must be dense layers, then sparse ones, {n_layers} in all"
        )
    count = raw.get("first_k_dense_replace")
    if count is not None and min(_whole(raw, "first_k_dense_replace"), n_layers) != n_dense:
        raise ValueError(
            f"config.json first_k_dense_replace={count} must be the {n_dense} dense layers of mlp_layer_types"
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
        ValueError: If the scaling is of another kind, or differs from layer to layer.
    """
    for key in ("rope_parameters", "rope_scaling"):
        _check_rope(key, raw.get(key))
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = _number(scaling if "rope_theta" in scaling else raw, "rope_theta", 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    for key, value in REQUIRED_ROPE_VALUES.items():
        if scaling.get(key, value) != value:
            raise ValueError(
                f"config.json rope {key}={_shown(scaling[key])} is not supported, only {value!r}"
            )
    if kind == "default":
        return YarnConfig(theta=theta, factor=1.0)
    if kind != "yarn":
        raise ValueError(
            f"config.json rope type {_shown(kind)} is not supported, only 'yarn' and 'default'"
        )
    return YarnConfig(
        theta=theta,
        factor=_number(scaling, "factor"),
        original_len=_whole(scaling, "original_max_position_embeddings"),
        # A zero stands for the default too, as in transformers.
        beta_fast=_number(scaling, "beta_fast", 0.0) or 32.0,
        beta_slow=_number(scaling, "beta_slow", 0.0) or 1.0,
        mscale=_number(scaling, "mscale", 0.0),
        mscale_all_dim=_number(scaling, "mscale_all_dim", 0.0),
    )


def _check_rope(key: str, scaling: Any) -> None:
    """Refuse what is no flat object of settings, such as settings for each kind of layer."""
    if scaling is None:
        return
    if not isinstance(scaling, dict):
        raise ValueError(f"config.json {key}={_shown(scaling)} must be an object")
    unknown = sorted(scaling.keys() - ROPE_KEYS)
    if unknown:
        raise ValueError(f"config.json {key}.{_shown(unknown[0])[1:-1]} is not supported")
    if "factor" in scaling and not scaling.keys() & {"rope_type", "type"}:
        raise ValueError(f"config.json {key} has a factor and no rope_type")
