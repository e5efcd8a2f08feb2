"""Environments by name."""

from dsv32_jax.errors import UsageError
from train.agents.environment import Environment
from train.rl.rewards import load_function


def load_environment(place: str) -> Environment:
    """Make an environment that a config or a command line names.

    Args:
        place: `FILE.py:NAME`, a function without arguments that returns it.

    Returns:
        The environment.

    Raises:
        UsageError: If there is no such file or function, or it returns something else.
    """
    found = load_function(place, "environments")()
    if not all(hasattr(found, name) for name in ("name", "tasks", "open", "solve")):
        raise UsageError(f"environments={place} returned a {type(found).__name__}, no environment")
    return found
