"""What is left of an attempt at a task, as values that go to JSON and back."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from train.agents.environment import Grade
from train.agents.schemas import Outcome
from train.rl.rollout import Rollout

EndReason = Literal["answer", "steps", "tokens", "context", "seconds", "refused", "failed"]
CallOutcome = Outcome | Literal["unreadable", "unknown"]


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """A call that a policy made, and what it was answered.

    Attributes:
        step: The turn, from 1.
        name: Of the tool; "" where the call could not be read.
        arguments: By keyword; what is no JSON object, as text under "".
        outcome: As `schemas.Result` has it; "unreadable", no call could be made of it; "unknown", of no tool.
        result: That the policy was shown.
        seconds: That it took.
    """

    step: int
    name: str
    arguments: Mapping[str, Any]
    outcome: CallOutcome
    result: str
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """An attempt from the first message to its end.

    Attributes:
        task: Its name.
        environment: Its environment's name.
        messages: All that was said, system message and reasoning included, also what was dropped from later contexts.
        calls: In the order they were made.
        end: "answer", the policy ended its turn without a call; a limit: "steps", "tokens", "seconds" or, of the
            window, "context"; "refused", the endpoint would not take the conversation; "failed", the environment could
            not be opened.
        answer: The last message's content; "" unless `end` is "answer".
        steps: Turns of the policy, those for summaries included.
        tokens: That the policy wrote.
        seconds: From opening to grading.
        resets: Times that the context was begun anew.
        grade: The verifier's; None where the environment failed.
        note: Why it was refused or failed.
        rollout: The same token by token, where the policy is this project's; not in JSON.
    """

    task: str
    environment: str
    messages: tuple[Mapping[str, Any], ...]
    calls: tuple[CallRecord, ...]
    end: EndReason
    answer: str
    steps: int
    tokens: int
    seconds: float
    resets: int = 0
    grade: Grade | None = None
    note: str = ""
    rollout: Rollout | None = field(default=None, compare=False, repr=False)

    @property
    def solved(self) -> bool:
        """Whether the verifier gave it 1."""
        return self.grade is not None and self.grade.score == 1


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Return what JSON can hold of a trajectory: all but its tokens."""
    bare = dataclasses.replace(trajectory, rollout=None)
    found = dataclasses.asdict(bare)
    del found["rollout"]
    return found


def from_json(value: Mapping[str, Any]) -> Trajectory:
    """Read what `to_json` returned.

    Args:
        value: The object.

    Returns:
        The trajectory.

    Raises:
        ValueError: If it is none; names the field.
    """
    try:
        return Trajectory(
            **{
                **value,
                "messages": tuple(value["messages"]),
                "calls": tuple(CallRecord(**call) for call in value["calls"]),
                "grade": None if value["grade"] is None else Grade(**value["grade"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no trajectory: {error}") from error
