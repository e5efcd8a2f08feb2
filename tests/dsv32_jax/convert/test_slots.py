import dataclasses
import functools
import math

import numpy as np
import pytest

from dsv32_jax import config
from dsv32_jax.convert import slots


@functools.cache
def released():
    return slots.slots(config.v32_671b())


def test_the_released_model_has_the_elements_and_bytes_of_its_files():
    # 685,396,921,376 elements in 689,471,107,200 bytes; 45,932 FP8 weights, 561 others.
    elements = n_bytes = n_quantised = 0
    for slot in released().values():
        size = math.prod(slot.official)
        elements += size
        if slot.quantised:
            n_scales = math.prod(slot.scale_shape[-2:])
            elements += n_scales
            n_bytes += size + 4 * n_scales
            n_quantised += 1
        else:
            n_bytes += size * (4 if len(slot.official) == 1 else 2)

    assert (n_quantised, len(released()) - n_quantised) == (45_932, 561)
    assert (elements, n_bytes) == (685_396_921_376, 689_471_107_200)


@pytest.mark.parametrize(
    ("name", "official", "scales"),
    [
        ("self_attn.q_a_proj.weight", (1536, 7168), (12, 56)),
        ("self_attn.q_b_proj.weight", (24576, 1536), (192, 12)),
        ("self_attn.kv_a_proj_with_mqa.weight", (576, 7168), (5, 56)),
        ("self_attn.kv_b_proj.weight", (32768, 512), (256, 4)),
        ("self_attn.o_proj.weight", (7168, 16384), (56, 128)),
        ("self_attn.indexer.wq_b.weight", (8192, 1536), (64, 12)),
        ("self_attn.indexer.wk.weight", (128, 7168), (1, 56)),
        ("mlp.experts.7.gate_proj.weight", (2048, 7168), (16, 56)),
        ("mlp.experts.7.down_proj.weight", (7168, 2048), (56, 16)),
    ],
)
def test_shapes_are_those_of_the_released_files(name, official, scales):
    slot = released()[f"model.layers.5.{name}"]

    assert slot.official == official
    assert slot.scale_shape[-2:] == scales
    assert slot.quantised


@pytest.mark.parametrize(
    ("name", "official"),
    [
        ("model.embed_tokens.weight", (129280, 7168)),
        ("lm_head.weight", (129280, 7168)),
        ("model.layers.5.mlp.gate.weight", (256, 7168)),
        ("model.layers.5.self_attn.indexer.weights_proj.weight", (64, 7168)),
        ("model.layers.61.eh_proj.weight", (7168, 14336)),
        ("model.layers.5.self_attn.kv_a_layernorm.weight", (512,)),
    ],
)
def test_what_is_not_quantised_has_its_shape_too(name, official):
    assert (released()[name].official, released()[name].quantised) == (official, False)


def test_no_part_of_the_released_model_is_larger_than_the_memory_that_is_planned_for():
    largest = max(math.prod(slot.chunks) for slot in released().values())

    assert largest <= 33_554_432
    assert max(slot.parts for slot in released().values()) < 200


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.q_b_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.1.self_attn.kv_b_proj.weight",
        "model.layers.1.mlp.experts.3.down_proj.weight",
        "model.layers.2.eh_proj.weight",
    ],
)
@pytest.mark.parametrize("part_elements", [1, 50_000, 1 << 30])
def test_parts_of_official_rows_are_the_chunks_of_the_parameter(monkeypatch, name, part_elements):
    monkeypatch.setattr(slots, "PART_ELEMENTS", part_elements)
    tiny = config.tiny()
    mla = dataclasses.replace(tiny.mla, n_heads=8, nope_dim=24, rope_dim=8, v_dim=40)
    cfg = dataclasses.replace(tiny, n_layers=2, vocab_size=384, dim=256, mla=mla)
    slot = slots.slots(cfg)[name]
    rng = np.random.default_rng(0)
    official = rng.normal(size=slot.official).astype(np.float32)
    turned = official if slot.place.path == "embed" else official.T
    want = np.zeros(slot.shape, np.float32)
    want[slot.place.indices] = turned.reshape(slot.own)

    got = np.zeros(slot.shape, np.float32)
    for part in range(slot.parts):
        rows = official[part * slot.rows : (part + 1) * slot.rows]
        turned = rows if slot.place.path == "embed" else rows.T
        got[slot.slices(part)] = turned.reshape(slot.chunks)
        np.testing.assert_array_equal(slot.to_official(got[slot.slices(part)]), rows)

    np.testing.assert_array_equal(got, want)
    assert slot.rows * slot.parts == slot.official[0]
    assert slot.parts == 1 or slot.rows % 128 == 0
    if part_elements == 1 and len(slot.official) > 1 and slot.official[0] >= 256:
        assert slot.parts > 1


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize("shape", [(1, 1), (63, 130), (64, 5), (200, 129)])
def test_transposing_in_strips_is_transposing(dtype, shape):
    x = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)

    np.testing.assert_array_equal(slots.transpose(x), x.T)
