import dataclasses
import math
from collections import Counter

import pytest

from dsv32_jax import config, parameters
from dsv32_jax.convert.names import Place, places

CFG = config.tiny()


def test_the_released_model_has_as_many_tensors_as_its_files():
    # 92,425 tensors in the released files, 45,932 of which are scales of FP8 weights.
    assert len(places(config.v32_671b())) == 92_425 - 45_932


@pytest.mark.parametrize(
    "cfg",
    [
        CFG,
        dataclasses.replace(CFG, mtp=False),
        dataclasses.replace(CFG, n_dense_layers=0),
        dataclasses.replace(CFG, n_dense_layers=CFG.n_layers),
    ],
)
def test_every_entry_of_every_parameter_is_filled_once(cfg):
    shapes = parameters.abstract(cfg)
    shapes = shapes.weights | shapes.router_bias
    own = [place for place in places(cfg).values() if not place.copy]

    assert len(set(own)) == len(own)
    assert {place.path for place in own} == shapes.keys()
    for path, count in Counter(place.path for place in own).items():
        depth = len(next(place.indices for place in own if place.path == path))
        assert count == math.prod(shapes[path].shape[:depth]), path
        for place in own:
            if place.path == path:
                assert all(i < n for i, n in zip(place.indices, shapes[path].shape, strict=False))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("lm_head.weight", Place("head")),
        ("model.layers.0.mlp.up_proj.weight", Place("dense_layers.ffn.w3", (0,))),
        ("model.layers.2.mlp.experts.5.down_proj.weight", Place("moe_layers.moe.w2", (1, 5))),
        ("model.layers.1.mlp.gate.e_score_correction_bias", Place("moe_layers.moe.gate.bias", (0,))),
        ("model.layers.1.self_attn.indexer.k_norm.bias",
         Place("moe_layers.attn.indexer.k_norm.bias", (0,))),
        ("model.layers.3.mlp.experts.5.gate_proj.weight", Place("mtp.block.moe.w1", (5,))),
        ("model.layers.3.shared_head.norm.weight", Place("mtp.norm.weight")),
        ("model.layers.3.shared_head.head.weight", Place("head", copy=True)),
        ("model.layers.3.embed_tokens.weight", Place("embed", copy=True)),
    ],
)  # fmt: skip
def test_a_tensor_has_its_place(name, place):
    assert places(CFG)[name] == place


def test_without_mtp_no_layer_follows_the_last():
    names = places(dataclasses.replace(CFG, mtp=False))

    assert not [name for name in names if name.startswith(f"model.layers.{CFG.n_layers}.")]
