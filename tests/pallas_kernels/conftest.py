import jax
import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_compiles():
    """Compile without most optimizations: these shapes are tiny and compiling is nearly all of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def calc_diff():
    """Return the low-precision metric `1 - 2<x,y>/(<x,x>+<y,y>)` in float64, 0 for equal arrays."""

    def diff(x, y):
        x, y = (np.asarray(a, np.float32).astype(np.float64) for a in (x, y))
        return 1 - 2 * np.sum(x * y) / (np.sum(x * x) + np.sum(y * y))

    return diff


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def draw_ranges():
    """Return random causal key ranges [T] or [B, T]: documents that start late, some empty rows."""

    def draw(rng, shape, n_keys, *, empty=True):
        end = np.minimum(np.arange(1, shape[-1] + 1) + max(n_keys - shape[-1], 0), n_keys)
        end = np.broadcast_to(end, shape).astype(np.int32)
        start = (end * rng.uniform(0, 1, shape) ** 3).astype(np.int32)
        start = np.minimum(start, np.maximum(end - 1, 0))
        if empty and shape[-1] > 2:
            start[..., 2] = end[..., 2]
        return start, end

    return draw
