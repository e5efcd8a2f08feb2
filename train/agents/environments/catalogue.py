"""Environments by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast, get_args

from dsv32_jax.errors import UsageError
from train.agents.environment import Environment
from train.agents.environments.bfcl import Bfcl
from train.agents.environments.code_repair import CodeRepair
from train.agents.environments.interpreter import Interpreter
from train.agents.environments.reasoning import Reasoning
from train.agents.environments.search import Search
from train.agents.environments.synthetic import Synthetic
from train.agents.environments.trips import Trips
from train.agents.synthesis.store import HeldOut
from train.overrides import nearest
from train.rl.problems import Family

SIMPLE: Mapping[str, Callable[[], Environment]] = {
    "trips": Trips,
    "interpreter": Interpreter,
    "search": Search,
    "code_repair": CodeRepair,
}
FORMS: Mapping[str, str] = {
    "synthetic:FOLDER": Synthetic.summary
    + "; FOLDER:tasks or FOLDER:tools takes one kind of held-out ones",
    "search:FOLDER": "search in a folder of text files of your own",
    "reasoning:FAMILY": Reasoning.summary + ", such as reasoning:chain_sum:max_terms=3",
    "bfcl:FOLDER": Bfcl.summary,
}


def make(name: str) -> Environment:
    """Return an environment.

    Args:
        name: As `SIMPLE` or `FORMS` have it.

    Returns:
        The environment.

    Raises:
        UsageError: If there is none of that name, or what it needs is missing.
    """
    kind, colon, rest = name.partition(":")
    if name in SIMPLE:
        return SIMPLE[name]()
    if not (colon and rest):
        known = [*SIMPLE, *(form.partition(":")[0] for form in FORMS)]
        close = nearest(kind, known)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UsageError(
            f"there is no environment {name!r}{hint}; there are {', '.join([*SIMPLE, *FORMS])}"
        )
    if kind == "synthetic":
        folder, _, held_out = rest.rpartition(":")
        if folder and held_out in get_args(HeldOut):
            return Synthetic(Path(folder), cast(HeldOut, held_out))
        return Synthetic(Path(rest))
    if kind == "search":
        return Search(Path(rest))
    if kind == "reasoning":
        return Reasoning(Family.from_text(rest))
    if kind == "bfcl":
        return Bfcl(Path(rest))
    raise UsageError(f"there is no environment {name!r}; there are {', '.join([*SIMPLE, *FORMS])}")
