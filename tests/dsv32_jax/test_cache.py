"""tests/dsv32_jax/generate/test_decoder.py has what attention makes of the cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import cache, sharding
from dsv32_jax.cache import CacheConfig
from dsv32_jax.sharding import MeshConfig
from pallas_kernels import dispatch
from pallas_kernels.paged_mla import layout

LAYOUT = CacheConfig(n_pages=6, page_size=4, keep_experts=True)


@pytest.fixture
def view():
    """Two sequences whose pages lie apart."""
    table = jnp.asarray([[5, 0, 2], [3, 1, 4]], jnp.int32)
    return cache.View(jnp.asarray([[3, 4, -1], [0, 1, 2]], jnp.int32), table, 4)


def test_a_position_lies_in_its_page(view):
    np.testing.assert_array_equal(view.rows(view.position), [[23, 0, -1], [12, 13, 14]])
    np.testing.assert_array_equal(view.end, [[4, 5, 0], [1, 2, 3]])


@pytest.mark.parametrize("lie", ["parts", "records"])
def test_what_is_written_is_read_in_order_and_nothing_else_changes(cfg, view, rng, lie):
    config = dataclasses.replace(LAYOUT, layout=lie)
    layer = cache.make_layer(cfg, config, moe=True)
    widths = cfg.mla.kv_lora_rank, cfg.mla.rope_dim, cfg.indexer.head_dim
    everywhere = jnp.arange(24, dtype=jnp.int32)[None]
    layer = cache.write(layer, everywhere, *(jnp.full((1, 24, width), 7.0) for width in widths))
    layer = layer._replace(experts=jnp.full_like(layer.experts, 7))
    latent, k_rope, index = (
        jnp.asarray(rng.normal(size=(2, 3, width)), jnp.float32) for width in widths
    )
    rows = view.rows(view.position)
    written = cache.write(layer, rows, latent, k_rope, index)
    read_latent, read_rope = cache.read_latents(written, view, jnp.float32)
    keys = cache.read_index_keys(written, view, jnp.float32)
    for read, given in ((read_latent, latent), (read_rope, k_rope), (keys, index)):
        np.testing.assert_array_equal(read[0, 3:5], given[0, :2])
        np.testing.assert_array_equal(read[1, :3], given[1])
        assert (np.asarray(read[0, :3]) == 7).all()  # written before
        assert (np.asarray(read[0, 5:]) == 0).all()  # past the end, whatever lies there
        assert (np.asarray(read[1, 3:]) == 0).all()
    untouched = np.setdiff1d(np.arange(24), np.asarray(rows))
    for part in layout.read(written.attended, jnp.asarray(untouched)):
        assert (np.asarray(part) == 7).all()
    experts = jnp.arange(12).reshape(2, 3, 2)
    kept = cache.write_experts(written, rows, experts).experts
    np.testing.assert_array_equal(np.asarray(kept)[[23, 0, 12]], experts[[0, 0, 1], [0, 1, 0]])
    assert (np.asarray(kept)[untouched] == 7).all()


@pytest.mark.parametrize(("n_pages", "kind"), [(6, "uint16"), (2**14, "uint32")])
def test_selections_are_read_back_in_as_few_bytes_as_rows_need(cfg, view, n_pages, kind):
    layout = CacheConfig(n_pages=n_pages, page_size=4, keep_selection=True)
    layer = cache.make_layer(cfg, layout, moe=False)
    keys = np.full((2, 3, cfg.indexer.topk), -1)
    keys[0, 0, :3], keys[1, 2, :1] = [0, 1, 3], [2]

    written = cache.write_selection(layer, view.rows(view.position), jnp.asarray(keys))
    read = cache.read_selection([written, written], [3, 1, 4], 3, 4)

    assert written.selection.dtype == kind
    np.testing.assert_array_equal(read, [keys[1], keys[1]])
    assert not np.asarray(written.selection)[[20, 21, 22]].any()  # of tokens before
    bare = cache.make_layer(cfg, LAYOUT, moe=False)
    assert cache.write_selection(bare, view.rows(view.position), jnp.asarray(keys)) is bare
    assert cache.read_selection([bare], [3], 3, 4) is None


@pytest.mark.parametrize("lie", ["parts", "records"])
def test_fp8_rows_are_read_back_as_their_rounded_values(cfg, view, lie):
    config = dataclasses.replace(LAYOUT, dtype="fp8", layout=lie)
    layer = cache.make_layer(cfg, config, moe=False)
    # Powers of two times three-bit mantissas survive e4m3 exactly; one third does not.
    values = jnp.asarray([[[1.5, -0.75] * 8, [0.0] * 16, [1.0] * 16]] * 2, jnp.float32)
    third = jnp.full((2, 3, cfg.indexer.head_dim), 1 / 3)
    rope = jnp.zeros((2, 3, cfg.mla.rope_dim))
    written = cache.write(layer, view.rows(view.position), values, rope, third)
    latent, _ = cache.read_latents(written, view, jnp.float32)
    np.testing.assert_array_equal(latent[0, 3], values[0, 0])
    keys = cache.read_index_keys(written, view, jnp.float32)
    np.testing.assert_array_equal(keys[0, 3], np.full(cfg.indexer.head_dim, 0.34375))


def test_every_layer_has_a_cache_and_the_module_after_them(cfg):
    layers = cache.make_cache(cfg, LAYOUT, mtp=True)
    assert len(layers) == cfg.n_layers + 1
    assert [layer.experts is not None for layer in layers] == [False, True, True]
    assert len(cache.make_cache(cfg, LAYOUT, mtp=False)) == cfg.n_layers


def test_a_tpu_keeps_records_unless_its_mesh_cuts_the_cache(cfg, monkeypatch):
    def kind(**config):
        config = dataclasses.replace(LAYOUT, **config)
        return type(cache.make_layer(cfg, config, moe=False).attended)

    assert kind() is layout.Parts
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    assert kind() is layout.Records
    assert kind(layout="parts") is layout.Parts
    monkeypatch.setattr(cache, "is_cut", lambda: True)
    assert kind() is layout.Parts
    assert kind(layout="records") is layout.Records


def test_a_mesh_that_shards_sequences_cuts_the_cache():
    assert not cache.is_cut()
    with sharding.on_mesh(sharding.make_mesh(MeshConfig(ici_fsdp=-1))):
        assert cache.is_cut() == (jax.device_count() > 1)


@pytest.mark.parametrize("field", ["n_pages", "page_size"])
def test_sizes_must_be_positive(field):
    with pytest.raises(ValueError, match=f"{field}=0"):
        CacheConfig(**{field: 0})


def test_a_layout_must_be_known():
    config = CacheConfig()
    object.__setattr__(config, "layout", "rows")  # the tests' type checks would come first
    with pytest.raises(ValueError, match="layout='rows' must be one of auto, parts, records"):
        config.__post_init__()
