import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dsv32_jax import config, parameters
from dsv32_jax.config import ModelConfig


@pytest.fixture(scope="session", autouse=True)
def quick_compiles():
    """Compile without most optimizations: these shapes are tiny and compiling is nearly all of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


INDEX = "model.safetensors.index.json"


def official_config(cfg: ModelConfig) -> dict:
    """Write a model's architecture with the official keys and the old form of the rotation."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.dim,
        "intermediate_size": cfg.ffn_dim,
        "moe_intermediate_size": cfg.moe.expert_dim,
        "num_hidden_layers": cfg.n_layers,
        "first_k_dense_replace": cfg.n_dense_layers,
        "moe_layer_freq": 1,
        "num_attention_heads": cfg.mla.n_heads,
        "num_key_value_heads": cfg.mla.n_heads,
        "q_lora_rank": cfg.mla.q_lora_rank,
        "kv_lora_rank": cfg.mla.kv_lora_rank,
        "qk_nope_head_dim": cfg.mla.nope_dim,
        "qk_rope_head_dim": cfg.mla.rope_dim,
        "v_head_dim": cfg.mla.v_dim,
        "n_routed_experts": cfg.moe.n_experts,
        "n_shared_experts": cfg.moe.n_shared,
        "num_experts_per_tok": cfg.moe.n_active,
        "n_group": cfg.moe.n_groups,
        "topk_group": cfg.moe.n_active_groups,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": cfg.moe.normalize_gates,
        "routed_scaling_factor": cfg.moe.route_scale,
        "num_nextn_predict_layers": int(cfg.mtp),
        "index_n_heads": cfg.indexer.n_heads,
        "index_head_dim": cfg.indexer.head_dim,
        "index_topk": cfg.indexer.topk,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "initializer_range": cfg.init_std,
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "rope_theta": cfg.rope.theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": cfg.rope.factor,
            "original_max_position_embeddings": cfg.rope.original_len,
            "beta_fast": cfg.rope.beta_fast,
            "beta_slow": cfg.rope.beta_slow,
            "mscale": cfg.rope.mscale,
            "mscale_all_dim": cfg.rope.mscale_all_dim,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def official_tensors(cfg: ModelConfig, arrays: dict) -> dict[str, np.ndarray]:
    """Name and lay out a model's arrays as the official files do: matrices are [out, in], one an expert."""

    def out_in(x, n_in=1):
        x = np.asarray(x)
        return x.reshape(int(np.prod(x.shape[:n_in])), -1).swapaxes(0, 1)

    def layer(at, i, stack, moe):
        def own(name):
            value = arrays[f"{stack}.{name}"]
            return value if i is None else value[i]

        attn = f"{at}.self_attn"
        yield f"{at}.input_layernorm.weight", own("attn_norm.weight")
        yield f"{at}.post_attention_layernorm.weight", own("ffn_norm.weight")
        yield f"{attn}.q_a_proj.weight", out_in(own("attn.wq_a"))
        yield f"{attn}.q_a_layernorm.weight", own("attn.q_norm.weight")
        yield f"{attn}.q_b_proj.weight", out_in(own("attn.wq_b"))
        yield f"{attn}.kv_a_proj_with_mqa.weight", out_in(own("attn.wkv_a"))
        yield f"{attn}.kv_a_layernorm.weight", own("attn.kv_norm.weight")
        yield f"{attn}.kv_b_proj.weight", out_in(own("attn.wkv_b"))
        yield f"{attn}.o_proj.weight", out_in(own("attn.wo"), n_in=2)
        yield f"{attn}.indexer.wq_b.weight", out_in(own("attn.indexer.wq_b"))
        yield f"{attn}.indexer.wk.weight", out_in(own("attn.indexer.wk"))
        yield f"{attn}.indexer.k_norm.weight", own("attn.indexer.k_norm.weight")
        yield f"{attn}.indexer.k_norm.bias", own("attn.indexer.k_norm.bias")
        yield f"{attn}.indexer.weights_proj.weight", out_in(own("attn.indexer.weights_proj"))
        three = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        for theirs, ours in three.items():
            if not moe:
                yield f"{at}.mlp.{theirs}.weight", out_in(own(f"ffn.{ours}"))
                continue
            yield f"{at}.mlp.shared_experts.{theirs}.weight", out_in(own(f"moe.shared.{ours}"))
            for e, expert in enumerate(own(f"moe.{ours}")):
                yield f"{at}.mlp.experts.{e}.{theirs}.weight", out_in(expert)
        if moe:
            yield f"{at}.mlp.gate.weight", out_in(own("moe.gate.weight"))
            yield f"{at}.mlp.gate.e_score_correction_bias", own("moe.gate.bias")

    tensors = {
        "model.embed_tokens.weight": arrays["embed"],
        "model.norm.weight": arrays["norm.weight"],
        "lm_head.weight": out_in(arrays["head"]),
    }
    for i in range(cfg.n_layers):
        moe = i >= cfg.n_dense_layers
        stack, place = ("moe_layers", i - cfg.n_dense_layers) if moe else ("dense_layers", i)
        tensors |= layer(f"model.layers.{i}", place, stack, moe)
    if cfg.mtp:
        at = f"model.layers.{cfg.n_layers}"
        tensors |= layer(at, None, "mtp.block", True)
        tensors |= {
            f"{at}.embed_tokens.weight": arrays["embed"],
            f"{at}.shared_head.head.weight": out_in(arrays["head"]),
            f"{at}.shared_head.norm.weight": arrays["mtp.norm.weight"],
            f"{at}.enorm.weight": arrays["mtp.enorm.weight"],
            f"{at}.hnorm.weight": arrays["mtp.hnorm.weight"],
            f"{at}.eh_proj.weight": out_in(arrays["mtp.eh_proj"]),
        }
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def save_official(
    folder: Path, raw: dict, tensors: dict[str, np.ndarray], n_files: int = 1
) -> None:
    """Write a folder in the official layout, the tensors dealt out to the files in turn."""
    (folder / "config.json").write_text(json.dumps(raw))
    if n_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for i in range(n_files):
        name = f"model-{i + 1:05d}-of-{n_files:06d}.safetensors"
        part = dict(list(tensors.items())[i::n_files])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def draw_parameters(cfg: ModelConfig, seed: int = 0) -> parameters.Parameters:
    """Draw every array, norms and biases too, so that no two tensors could be confused unnoticed."""
    rng = np.random.default_rng(seed)
    shapes = parameters.abstract(cfg)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32), shapes)


@pytest.fixture(scope="session")
def draw() -> Callable:
    return draw_parameters


@pytest.fixture
def official(tmp_path) -> Callable:
    """Write a model in the official layout; return the folder, its config and its tensors for a change.

    Called with what was returned, changed, it writes that again.
    """

    def write(cfg=None, params=None, *, raw=None, tensors=None, n_files=1, name="official"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        raw = official_config(cfg) if raw is None else raw
        if tensors is None:
            tensors = official_tensors(cfg, params.weights | params.router_bias)
        save_official(folder, raw, tensors, n_files)
        return folder, raw, tensors

    return write


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def cfg():
    """Two layers, one dense and one of experts, and the MTP module; every width its own number."""
    tiny = config.tiny()
    indexer = dataclasses.replace(tiny.indexer, n_heads=6, topk=8)
    return dataclasses.replace(tiny, n_layers=2, indexer=indexer)


@pytest.fixture(scope="session")
def new_model():
    """Return a function that draws a model whose every weight is random, norms and biases too.

    By numpy: compiling the random draws of a whole model takes longer than the tests.
    """

    def draw(cfg, seed=0):
        rng = np.random.default_rng(seed)

        def fill(name, leaf):
            one = "norm" in name and name.endswith("weight")
            return jnp.asarray(one + 0.14 * rng.normal(size=leaf.shape), leaf.dtype)

        groups = ({n: fill(n, a) for n, a in group.items()} for group in parameters.abstract(cfg))
        return parameters.assemble(cfg, parameters.Parameters(*groups))

    return draw


@pytest.fixture(scope="session")
def model(cfg, new_model):
    return new_model(cfg)


MODES = ("dense", "sparse", "gathered", "window")


@pytest.fixture(scope="session")
def attention():
    """Return (cfg, mode) of one of MODES; "gathered" is sparse attention in absorbed form."""

    def choose(cfg, mode):
        if mode != "gathered":
            return cfg, mode
        return dataclasses.replace(
            cfg, mla=dataclasses.replace(cfg.mla, masked_max_len=0)
        ), "sparse"

    return choose
