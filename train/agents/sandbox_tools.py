"""Tools over a sandbox: Python with a memory, and bash."""

from train.agents import schemas
from train.agents.session import CALL_S, Output, Session
from train.agents.tools import Tool, ToolError


def sandbox_tools(session: Session, *, timeout_s: float = CALL_S) -> list[Tool]:
    """Make tools of a session, which stays the caller's.

    Args:
        session: Open.
        timeout_s: That a call may take.

    Returns:
        `python` and `bash`. What fails in the sandbox is the policy's to read; a dead one is an error of each call.
    """

    def python(code: str) -> str:
        """Run Python in a session that keeps its variables; returns what it prints and the last value.

        Args:
            code: As in a cell of a notebook.
        """
        return _told(session.python(code, timeout_s=timeout_s))

    def bash(command: str) -> str:
        """Run a command line in a new shell; returns what it writes. Files stay.

        Args:
            command: For bash.
        """
        return _told(session.bash(command, timeout_s=timeout_s))

    return [schemas.tool_of(python), schemas.tool_of(bash)]


def _told(output: Output) -> str:
    if output.status == "dead":
        raise ToolError(f"the sandbox is dead: {output.text.strip()}")
    return output.text
