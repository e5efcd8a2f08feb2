"""Environments by name."""

from dsv32_jax.errors import UsageError
from train.agents.environment import Environment
from train.rl.agent_tasks import make_environment
from train.rl.rewards import load_function


def load_environment(place: str) -> Environment:
    """Make an environment that a config or a command line names.

    Args:
        place: `FILE.py:NAME`, a function without arguments that returns it, or a name as `agent.environments` of GRPO
            takes it.

    Returns:
        The environment.

    Raises:
        UsageError: If there is none of that name, or what is named makes something else.
    """
    if ".py:" not in place:
        try:
            return make_environment(place)
        except ModuleNotFoundError as error:
            raise UsageError(f"there is no environment {place!r}: {error}") from error
    found = load_function(place, "environments")()
    if not isinstance(found, Environment):
        raise UsageError(f"environments={place} returned a {type(found).__name__}, no environment")
    return found
