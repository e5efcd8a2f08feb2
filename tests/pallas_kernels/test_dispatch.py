import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch


def refuse():
    raise NotImplementedError("needs even dims, got 3")


@pytest.fixture
def log(caplog):
    """Return the log, with nothing remembered as said."""
    dispatch._log_choice.cache_clear()
    caplog.set_level("INFO", logger="pallas_kernels.dispatch")
    return caplog


def test_the_first_backend_that_takes_the_input_is_chosen():
    assert dispatch.choose("op", None, {"fast": None, "slow": None}) == "fast"
    assert dispatch.choose("op", None, {"fast": refuse, "slow": None}) == "slow"


def test_a_named_backend_is_taken():
    assert dispatch.choose("op", "slow", {"fast": None, "slow": None}) == "slow"


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"op: implementation='none' must be one of \('fast', 'slow'\)"
    ):
        dispatch.choose("op", "none", {"fast": None, "slow": None})


def test_a_named_backend_that_cannot_take_the_input_says_why_and_is_not_replaced():
    with pytest.raises(NotImplementedError, match="op: fast: needs even dims, got 3"):
        dispatch.choose("op", "fast", {"fast": refuse, "slow": None})


def test_all_reasons_are_given_when_nothing_takes_the_input():
    with pytest.raises(NotImplementedError, match=r"op: a: needs even.*; op: b: needs even"):
        dispatch.choose("op", None, {"a": refuse, "b": refuse})


def test_a_choice_is_logged_once_with_what_was_passed_over(log):
    for _ in range(2):
        dispatch.choose("op", None, {"fast": refuse, "slow": None})
        dispatch.choose("other", None, {"fast": None})

    assert [r.getMessage() for r in log.records] == [
        "op runs as slow (op: fast: needs even dims, got 3)",
        "other runs as fast",
    ]


def test_another_device_than_hopper_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="needs an NVIDIA Hopper GPU, this is cpu"):
        dispatch.require_hopper()


def test_another_device_than_a_tpu_is_refused_by_name(monkeypatch):
    with pytest.raises(NotImplementedError, match="needs a TPU, this is cpu"):
        dispatch.require_tpu()
    monkeypatch.setattr(dispatch, "_device", lambda: types.SimpleNamespace(platform="tpu"))
    dispatch.require_tpu()


def test_a_mesh_of_another_platform_is_what_is_compiled_for():
    tpu = jax.sharding.AbstractDevice(device_kind="TPU v5", num_cores=2, platform="tpu")
    auto = (jax.sharding.AxisType.Auto,)
    assert dispatch.platform() == "cpu"
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((2,), ("x",), auto, abstract_device=tpu)
    ):
        assert dispatch.platform() == "tpu"
        with pytest.raises(NotImplementedError, match="this is TPU v5"):
            dispatch.require_hopper()
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=auto)):
        assert dispatch.platform() == "cpu"


@pytest.mark.parametrize(("device", "n"), [({"core_count": 114}, 114), ({}, 132)])
def test_kernels_are_sized_for_the_device_or_without_a_gpu_for_an_h200(monkeypatch, device, n):
    monkeypatch.setattr(dispatch, "_device", lambda: types.SimpleNamespace(**device))
    assert dispatch.multiprocessors() == n


@pytest.mark.parametrize("default", ["cpu", "device"])
def test_the_default_device_is_the_one_that_counts(default):
    device = jax.devices("cpu")[0] if default == "device" else default
    with (
        jax.default_device(device),
        pytest.raises(NotImplementedError, match="Hopper GPU, this is cpu"),
    ):
        dispatch.require_hopper()


def test_a_backend_without_its_package_is_not_available(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # import now raises ModuleNotFoundError
    for name in [m for m in sys.modules if m.startswith(("pallas_kernels.gluon", "triton."))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(NotImplementedError, match=r"needs triton: pip install dsv32-jax\[gpu\]"):
        dispatch.load("pallas_kernels.gluon_hopper")


def test_a_backend_that_lacks_something_else_is_a_fault():
    with pytest.raises(ModuleNotFoundError, match=r"pallas_kernels\.nowhere"):
        dispatch.load("pallas_kernels.nowhere")


@pytest.mark.parametrize("n_batch_axes", [0, 1, 2])
def test_over_batch_maps_every_leading_axis(n_batch_axes):
    x = np.arange(2.0 * 3 * 4).reshape(2, 3, 4)[(0,) * (2 - n_batch_axes)]

    out = dispatch.over_batch(lambda row: row - jnp.max(row), n_batch_axes)(x)

    np.testing.assert_array_equal(out, x - x.max(-1, keepdims=True))


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)])
def test_each_sequence_maps_every_leading_axis(batch):
    x = np.arange(120.0).reshape(-1, 4, 5)[: int(np.prod(batch))].reshape(*batch, 4, 5)

    out, total = dispatch.each_sequence(
        lambda a: (a["x"] - jnp.max(a["x"], -1, keepdims=True), jnp.sum(a["x"])),
        {"x": x},
        len(batch),
    )

    np.testing.assert_array_equal(out, x - x.max(-1, keepdims=True))
    np.testing.assert_array_equal(total, x.sum((-1, -2)))


def test_an_option_below_its_minimum_is_refused():
    dispatch.check_keyword("op", "k", 1, 1)
    with pytest.raises(ValueError, match="op: k=0 must be at least 1"):
        dispatch.check_keyword("op", "k", 0, 1)


def test_a_causal_promise_needs_equal_lengths():
    dispatch.check_causal("op", True, 4, 4)
    dispatch.check_causal("op", False, 4, 5)
    with pytest.raises(
        ValueError, match="op: causal=True needs as many queries as keys, got 4 and 5"
    ):
        dispatch.check_causal("op", True, 4, 5)


# The ops call these first. In these tests types are checked before, so here they are called by themselves.


def test_queries_and_keys_of_other_widths_are_refused():
    dispatch.check_width("op", 6, 6)
    with pytest.raises(ValueError, match="op: queries have 5 columns and keys 6"):
        dispatch.check_width("op", 5, 6)


def test_an_option_may_be_any_number_but_not_traced():
    for half in (0.5, np.float32(0.5), jnp.float32(0.5)):
        number = dispatch.number("op", "scale", half)
        assert type(number) is float
        assert number == 0.5
    with pytest.raises(ValueError, match="op: scale must be a number, not a traced array"):
        jax.jit(lambda x: dispatch.number("op", "scale", x))(0.5)
