import dataclasses

import jax
import numpy as np
import pytest

from dsv32_jax import config, parameters
from dsv32_jax.config import IndexerConfig, MLAConfig, MoEConfig, YarnConfig

MLA = {
    "n_heads": 2,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "nope_dim": 4,
    "rope_dim": 4,
    "v_dim": 4,
}
INDEXER = {"n_heads": 2, "head_dim": 8, "topk": 4}
MOE = {"n_experts": 8, "n_active": 2, "n_groups": 4, "n_active_groups": 2, "expert_dim": 4}


def test_the_official_yarn_scales_the_softmax_and_not_the_rotation():
    cfg = config.v32_671b()
    assert cfg.softmax_scale == pytest.approx(0.1352337789, abs=5e-11)
    assert cfg.rope.softmax_factor == pytest.approx(1.8738542071, abs=5e-11)
    assert cfg.rope.amplitude == 1


def test_without_extension_the_softmax_scale_is_plain():
    cfg = dataclasses.replace(config.v32_671b(), rope=YarnConfig(factor=1.0))
    assert cfg.softmax_scale == pytest.approx(192**-0.5)
    assert cfg.rope.amplitude == 1


def test_unequal_mscales_scale_the_rotation():
    m = lambda scale: 0.1 * scale * np.log(40) + 1  # noqa: E731
    assert YarnConfig(mscale=2.0).amplitude == pytest.approx(m(2) / m(1))
    assert YarnConfig(mscale=0.0, mscale_all_dim=0.0).amplitude == pytest.approx(m(1))
    assert YarnConfig(mscale_all_dim=0.0).softmax_factor == 1


def test_the_released_config_is_the_published_one():
    cfg = config.v32_671b()
    mla, moe, index = cfg.mla, cfg.moe, cfg.indexer
    assert (cfg.vocab_size, cfg.dim, cfg.ffn_dim, cfg.norm_eps) == (129280, 7168, 18432, 1e-6)
    assert (cfg.n_layers, cfg.n_dense_layers, cfg.n_moe_layers, cfg.mtp) == (61, 3, 58, True)
    assert (mla.n_heads, mla.q_lora_rank, mla.kv_lora_rank) == (128, 1536, 512)
    assert (mla.nope_dim, mla.rope_dim, mla.v_dim, mla.qk_dim) == (128, 64, 128, 192)
    assert (index.n_heads, index.head_dim, index.topk) == (64, 128, 2048)
    assert (moe.n_experts, moe.n_active, moe.n_shared, moe.expert_dim) == (256, 8, 1, 2048)
    assert (moe.n_groups, moe.n_active_groups, moe.group_size, moe.route_scale) == (8, 4, 32, 2.5)
    assert moe.normalize_gates


def count(arrays):
    return sum(int(np.prod(a.shape)) for a in arrays.values())


def test_the_released_model_has_the_published_number_of_parameters():
    params = parameters.abstract(config.v32_671b())
    mtp = {name: a for name, a in params.weights.items() if name.startswith("mtp.")}
    mtp_bias = count({n: a for n, a in params.router_bias.items() if n.startswith("mtp.")})
    indexers = {name: a for name, a in params.weights.items() if ".indexer." in name}
    assert count(params.weights) + count(params.router_bias) - count(mtp) - mtp_bias == (
        671_877_944_064
    )
    assert count(mtp) + mtp_bias == 11_624_027_648
    assert count({n: a for n, a in indexers.items() if n not in mtp}) == 851_524_864


@pytest.mark.parametrize("name", config.PRESETS)
def test_every_preset_builds(name):
    cfg = config.PRESETS[name]()
    params = parameters.abstract(cfg)
    assert all(isinstance(a, jax.ShapeDtypeStruct) for a in params.weights.values())
    assert params.weights["embed"].shape == (cfg.vocab_size, cfg.dim)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("v32_16b", 15e9, 18e9),
        ("v32_1b", 0.7e9, 1.3e9),
        ("gpu_100m", 7e7, 1.4e8),
        ("cpu_1m", 0.8e6, 1.4e6),
    ],
)
def test_presets_have_about_the_size_they_are_named_for(name, low, high):
    assert low < count(parameters.abstract(config.PRESETS[name]()).weights) < high


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (YarnConfig, {"theta": 1.0}, "theta=1.0 must be above 1"),
        (YarnConfig, {"factor": 0.5}, "factor=0.5 must be at least 1"),
        (YarnConfig, {"original_len": 0}, "original_len=0 must be at least 1"),
        (YarnConfig, {"beta_fast": 0.5}, "beta_fast=0.5 must be at least beta_slow=1.0"),
        (YarnConfig, {"beta_slow": 0.0}, "beta_slow=0.0 and both positive"),
        (MLAConfig, MLA | {"n_heads": 0}, "n_heads=0 must be at least 1"),
        (MLAConfig, MLA | {"rope_dim": 3}, "rope_dim=3 must be even and positive"),
        (MLAConfig, MLA | {"rope_dim": 0}, "rope_dim=0 must be even and positive"),
        (MLAConfig, MLA | {"masked_max_len": -1}, "masked_max_len=-1 must not be negative"),
        (MLAConfig, MLA | {"fp8_latent": True, "kv_lora_rank": 200}, "kv_lora_rank=200 to be a"),
        (IndexerConfig, INDEXER | {"topk": 0}, "topk=0 must be at least 1"),
        (IndexerConfig, INDEXER | {"head_dim": 12}, "head_dim=12 to be a power of two"),
        (
            IndexerConfig,
            INDEXER | {"head_dim": 200, "hadamard": False, "fp8": True},
            "head_dim=200 to be a multiple of 128",
        ),
        (MoEConfig, MOE | {"n_active": 0}, "n_active=0 must be at least 1"),
        (MoEConfig, MOE | {"n_groups": 3}, "n_groups=3 must divide n_experts=8"),
        (MoEConfig, MOE | {"n_active_groups": 5}, "n_active_groups=5 must be at most n_groups=4"),
        (MoEConfig, MOE | {"n_groups": 8}, "n_groups=8 leaves fewer than 2 of n_experts=8"),
        (MoEConfig, MOE | {"n_active": 5}, "n_active=5 must be at most the 4 experts"),
    ],
)
def test_a_part_that_makes_no_sense_is_refused(cls, fields, message):
    with pytest.raises(ValueError, match=message):
        cls(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 0}, "dim=0 must be at least 1"),
        ({"scan_unroll": 0}, "scan_unroll=0 must be at least 1"),
        ({"n_dense_layers": 4}, r"n_dense_layers=4 must be in \[0, n_layers=3\]"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 must be positive"),
        ({"init_std": -1.0}, "init_std=-1.0 must be positive"),
        (
            {"indexer": IndexerConfig(n_heads=1, head_dim=4, topk=1)},
            "indexer.head_dim=4 must be at least mla.rope_dim=8",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config.tiny(), **fields)


def test_fp8_kernels_need_an_indexer_that_rounds():
    cfg = config.PRESETS["cpu_1m"]()
    rounding = dataclasses.replace(cfg, indexer=dataclasses.replace(cfg.indexer, fp8=True))

    assert dataclasses.replace(rounding, kernels="fp8").implementation is None
    with pytest.raises(ValueError, match=r"kernels=fp8 needs indexer\.fp8=true"):
        dataclasses.replace(cfg, kernels="fp8")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_fp8_kernels_are_the_devices(monkeypatch, platform):
    monkeypatch.setattr(config.dispatch, "platform", lambda: platform)
    cfg = config.PRESETS["cpu_1m"]()
    rounding = dataclasses.replace(cfg, indexer=dataclasses.replace(cfg.indexer, fp8=True))
    fast = dataclasses.replace(rounding, kernels="fp8")
    assert fast.selection_implementation == f"pallas_{platform}_fp8"
