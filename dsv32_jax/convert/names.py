"""Official tensor names, each with the parameter that holds it."""

import re
from typing import NamedTuple

from dsv32_jax.config import ModelConfig

ATTENTION = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn.wq_a",
    "self_attn.q_a_layernorm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b",
    "self_attn.kv_a_proj_with_mqa.weight": "attn.wkv_a",
    "self_attn.kv_a_layernorm.weight": "attn.kv_norm.weight",
    "self_attn.kv_b_proj.weight": "attn.wkv_b",
    "self_attn.o_proj.weight": "attn.wo",
    "self_attn.indexer.wq_b.weight": "attn.indexer.wq_b",
    "self_attn.indexer.wk.weight": "attn.indexer.wk",
    "self_attn.indexer.k_norm.weight": "attn.indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "attn.indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "attn.indexer.weights_proj",
}
PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
DENSE = {f"mlp.{name}.weight": f"ffn.{w}" for name, w in PROJECTIONS.items()}
MOE = {
    "mlp.gate.weight": "moe.gate.weight",
    "mlp.gate.e_score_correction_bias": "moe.gate.bias",
    **{f"mlp.shared_experts.{name}.weight": f"moe.shared.{w}" for name, w in PROJECTIONS.items()},
}
MTP = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj",
    "shared_head.norm.weight": "norm.weight",
}
MTP_COPIES = {"embed_tokens.weight": "embed", "shared_head.head.weight": "head"}
TOP = {
    "model.embed_tokens.weight": "embed",
    "lm_head.weight": "head",
    "model.norm.weight": "norm.weight",
}
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")


class Place(NamedTuple):
    """Where an official tensor lives here.

    Attributes:
        path: Dotted path of the parameter.
        indices: Leading indices into it: layer, expert; () for the whole parameter.
        copy: The tensor repeats a parameter that another one fills (the MTP layer's embedding and head).
    """

    path: str
    indices: tuple[int, ...] = ()
    copy: bool = False


def places(cfg: ModelConfig) -> dict[str, Place]:
    """List every tensor of an official checkpoint of this model.

    Args:
        cfg: The model; with `mtp`, layer `n_layers` is the MTP module.

    Returns:
        Official name -> place. Every matrix is stored transposed, [out, in], but the embedding.
    """
    table = {name: Place(path) for name, path in TOP.items()}
    for layer in range(cfg.n_layers):
        dense = layer < cfg.n_dense_layers
        stack = "dense_layers" if dense else "moe_layers"
        index = (layer if dense else layer - cfg.n_dense_layers,)
        table |= _layer(cfg, layer, stack, index, moe=not dense)
    if cfg.mtp:
        prefix = f"model.layers.{cfg.n_layers}."
        table |= _layer(cfg, cfg.n_layers, "mtp.block", (), moe=True)
        table |= {prefix + name: Place(f"mtp.{path}") for name, path in MTP.items()}
        table |= {prefix + name: Place(path, copy=True) for name, path in MTP_COPIES.items()}
    return table


def _layer(
    cfg: ModelConfig, layer: int, stack: str, index: tuple[int, ...], *, moe: bool
) -> dict[str, Place]:
    """List the tensors of one decoder layer."""
    prefix = f"model.layers.{layer}."
    names = ATTENTION | (MOE if moe else DENSE)
    table = {prefix + name: Place(f"{stack}.{path}", index) for name, path in names.items()}
    if moe:
        for expert in range(cfg.moe.n_experts):
            for name, w in PROJECTIONS.items():
                key = f"{prefix}mlp.experts.{expert}.{name}.weight"
                table[key] = Place(f"{stack}.moe.{w}", (*index, expert))
    return table
