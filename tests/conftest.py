"""What every test file shares: a process that compiles thousands of programs must not run out of memory mappings."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

MAPPINGS = Path("/proc/self/maps")  # where there is one: on Linux
MOST_MAPPINGS = 20_000  # of the 65,530 that Linux allows; beyond them XLA aborts without a word


@pytest.fixture(scope="module", autouse=True)
def few_mappings() -> Iterator[None]:
    """Drop compiled programs between files once they hold many mappings; each holds about nine."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
