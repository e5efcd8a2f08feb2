"""What to do as the window fills: shorten the conversation, or make several and take one.

Functions on messages, and on trajectories; the loops drive them. What is called here the history of calls are the turns
with calls since the last user message, with their results.

Source: DeepSeek-V3.2 report, section 4.4: at 80% of the window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dsv32_jax.config import require
from dsv32_jax.encoding import Message
from train.agents.trajectory import Trajectory

Strategy = Literal["summary", "discard_75", "discard_all"]
SHARES: dict[str, float] = {"discard_75": 0.75, "discard_all": 1.0}
ASK_SUMMARY = (
    "The context is nearly full and will be begun anew. Write down what is needed to go on: what was found, what was"
    " tried and failed, and what is still to be done. Call no tool."
)
SUMMARY_LABEL = "\n\nWhat was found so far:\n"


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """How a context is managed.

    Attributes:
        strategy: "summary" has the policy sum the conversation up and goes on from that; "discard_75" drops the first
            three quarters of the history of calls, "discard_all" all of it.
        share: Of the window, beyond which it happens.
    """

    strategy: Strategy
    share: float = 0.8

    def __post_init__(self) -> None:
        """Check the range."""
        require(0 < self.share < 1, f"share={self.share} must be in (0, 1)")


def discard(messages: Sequence[Message], strategy: Strategy) -> list[Message]:
    """Drop the first part of the history of calls.

    Args:
        messages: The conversation, ending with results.
        strategy: "discard_75" or "discard_all".

    Returns:
        A shorter conversation; the same where there is no history.
    """
    asked = _last_user(messages)
    rounds = [i for i in range(asked + 1, len(messages)) if messages[i]["role"] == "assistant"]
    n = math.ceil(SHARES[strategy] * len(rounds))
    first = rounds[n] if n < len(rounds) else len(messages)
    return [*messages[: asked + 1], *messages[first:]]


def ask_summary(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with the request to sum it up."""
    return [*messages, {"role": "user", "content": ASK_SUMMARY}]


def with_summary(messages: Sequence[Message], summary: str) -> list[Message]:
    """Go on from a summary: what was asked last, with the summary behind it, and no history of calls.

    Args:
        messages: The conversation that was summed up.
        summary: What the policy wrote; of an earlier one only what it took over is left.

    Returns:
        The conversation to go on from.
    """
    asked = _last_user(messages)
    question = str(messages[asked]["content"]).partition(SUMMARY_LABEL)[0]
    return [
        *messages[:asked],
        {**messages[asked], "content": f"{question}{SUMMARY_LABEL}{summary.strip()}"},
    ]


def _last_user(messages: Sequence[Message]) -> int:
    return max(i for i, message in enumerate(messages) if message["role"] == "user")


class Parallel(NamedTuple):
    """Several independent attempts at one task.

    Attributes:
        chosen: The one that counts.
        steps: Of all.
        tokens: Of all.
    """

    chosen: Trajectory
    steps: int
    tokens: int


def fewest_steps(attempts: Sequence[Trajectory]) -> Parallel:
    """Take the attempt with the fewest steps, of those that came to an answer if there are such.

    Args:
        attempts: At one task, at least one; none is graded to choose it.

    Returns:
        The choice, and what all of them took.
    """
    chosen: Any = min(attempts, key=lambda one: (one.end != "answer", one.steps))
    return Parallel(chosen, sum(a.steps for a in attempts), sum(a.tokens for a in attempts))
