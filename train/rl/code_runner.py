"""Runs in the sandbox, by its source: a program beside it, and one test of it.

Says on standard error that it started, so that a program that fails is told from a sandbox that does.
"""

import json
import os
import sys
import types
from pathlib import Path

STARTED = b"started\n"
PROGRAM, TEST = "program.py", "test.json"


def main() -> None:
    """Run the program as one, or load it and test it."""
    source = Path(PROGRAM).read_text(encoding="utf-8")
    test = json.loads(Path(TEST).read_text(encoding="utf-8"))
    os.unlink(TEST)
    sys.argv = [PROGRAM]
    name = "__main__" if test["kind"] == "stdin" else "program"
    module = sys.modules[name] = types.ModuleType(name)
    os.write(2, STARTED)
    if test["kind"] == "stdin":
        exec(compile(source, PROGRAM, "exec"), module.__dict__)
        return
    results = os.dup(1)
    os.dup2(2, 1)  # what it prints is no result
    exec(compile(source, PROGRAM, "exec"), module.__dict__)
    if test["kind"] == "call":
        function = eval(test["call"], module.__dict__)
        result = json.dumps(function(*test["args"], **test["kwargs"]))
    else:
        exec(compile(test["code"], "test.py", "exec"), module.__dict__)
        result = test["token"]
    with os.fdopen(results, "w") as file:
        file.write(result)


if __name__ == "__main__":
    main()
