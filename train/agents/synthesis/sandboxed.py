"""Solutions that a model wrote, run where they can do no harm; what they say of themselves is checked outside again."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import train
from train.agents import runs
from train.agents.synthesis.solutions import Outcome
from train.agents.synthesis.worlds import World, to_json
from train.agents.tools import ToolCall

# All that running a solution needs, none of which is more than Python's own library.
SHIPPED = (
    "agents/tools.py", "agents/environment.py", "agents/environments/calling.py", "agents/synthesis/worlds.py",
    "agents/synthesis/database.py", "agents/synthesis/solutions.py",
)  # fmt: skip
PACKAGES = ("", "agents/", "agents/environments/", "agents/synthesis/")
TIMEOUT_S = 60.0
PROGRAM = """
import json, sys
sys.path.insert(0, "")
from train.agents.synthesis import solutions
from train.agents.synthesis.worlds import World
request = json.load(sys.stdin)
real, sys.stdout = sys.stdout, sys.stderr
world = World.from_json(request["world"])
for source in request["sources"]:
    o = solutions.run_in(world, source)
    calls = [[call.name, dict(call.arguments)] for call in o.calls]
    real.write(json.dumps({"calls": calls, "results": o.results, "answer": o.answer, "error": o.error}) + "\\n")
    real.flush()
"""


def run_sandboxed(
    world: World, sources: Sequence[str], *, timeout_s: float = TIMEOUT_S
) -> list[Outcome]:
    """Run solutions in a sandbox.

    Args:
        world: Theirs.
        sources: The solutions.
        timeout_s: For all of them.

    Returns:
        What each says came of it; an error for those that did not come to an end.

    Raises:
        SandboxError: If the sandbox failed.
    """
    root = Path(train.__path__[0])
    files = {f"train/{name}": (root / name).read_bytes() for name in SHIPPED}
    files |= {f"train/{folder}__init__.py": b"" for folder in PACKAGES}
    request = json.dumps({"world": to_json(world), "sources": list(sources)})
    ended = runs.run(
        [sys.executable, "-c", PROGRAM], stdin=request.encode(), files=files, timeout_s=timeout_s
    )
    found = [_outcome(line) for line in ended.stdout.splitlines()[: len(sources)]]
    why = (
        f"it did not come to an end ({ended.ended}): {ended.stderr.decode(errors='replace')[-300:]}"
    )
    return found + [Outcome(error=why)] * (len(sources) - len(found))


def _outcome(line: bytes) -> Outcome:
    try:
        said: Any = json.loads(line)
        calls = tuple(ToolCall(name=name, arguments=arguments) for name, arguments in said["calls"])
        return Outcome(
            calls=calls,
            results=tuple(said["results"]),
            answer=str(said["answer"]),
            error=str(said["error"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Outcome(error=f"the sandbox answers out of form: {error}")
