"""Tools of MCP servers, by the official SDK: a process that talks over its pipes, or a server by its address."""

import asyncio
import shlex
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from dsv32_jax.errors import UsageError
from train.agents.tools import Tool, ToolError

START_S = 30.0
CALL_S = 60.0
STOP_S = 5.0


class McpServer:
    """A connection to a server; a context manager. Threads may share it.

    Args:
        where: `http://...` of a streamable HTTP server, or the command line that starts one which talks over stdio.
        env: Variables of that process, beside the few that the SDK passes on.
        start_s: Seconds until its tools must be known.
        call_s: That a call may take.

    Attributes:
        tools: The server's.

    Raises:
        UsageError: If the package `mcp` is missing, or the server can not be reached; says why in a line.
    """

    def __init__(
        self,
        where: str,
        *,
        env: Mapping[str, str] | None = None,
        start_s: float = START_S,
        call_s: float = CALL_S,
    ) -> None:
        """Connect, and list the tools; the class docstring has the arguments."""
        try:
            import mcp
        except ImportError as error:
            raise UsageError(
                f"tools of servers need `pip install 'dsv32-jax[agents]'` ({error})"
            ) from error
        target: Any = where
        if not where.startswith(("http://", "https://")):
            command, *arguments = shlex.split(where)
            target = mcp.StdioServerParameters(
                command=command, args=arguments, env=dict(env) if env else None
            )
        self._where, self._call_s = where, call_s
        self._client = mcp.Client(target, read_timeout_seconds=call_s)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._listed: Future[list[Any]] = Future()
        self._thread = threading.Thread(target=self._serve, name="mcp", daemon=True)
        self._thread.start()
        try:
            listed = self._listed.result(start_s)
        except Exception as error:
            self.close()
            raise UsageError(f"the MCP server {where!r} does not start: {_why(error)}") from error
        self.tools = [self._tool(described) for described in listed]

    def __enter__(self) -> "McpServer":
        """Return the server."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close the connection; a process of the server ends with it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_S)

    def _serve(self) -> None:
        """Hold the connection, in the one task that may open and close it."""

        async def hold() -> None:
            async with self._client as client:
                self._listed.set_result((await client.list_tools()).tools)
                await self._stop.wait()

        async def until_stopped() -> None:
            holding = asyncio.ensure_future(hold())
            stopping = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait([holding, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not holding.done():
                await asyncio.wait([holding], timeout=STOP_S)
                holding.cancel()
            await asyncio.gather(holding, stopping, return_exceptions=True)
            if not self._listed.done():
                error = None if holding.cancelled() else holding.exception()
                self._listed.set_exception(error or ConnectionError("it was closed"))

        try:
            self._loop.run_until_complete(until_stopped())
        finally:
            self._loop.close()

    def _tool(self, described: Any) -> Tool:
        def call(**arguments: Any) -> str:
            return self._call(described.name, arguments)

        return Tool(
            name=described.name,
            description=described.description or "",
            parameters=described.input_schema,
            function=call,
        )

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if not self._thread.is_alive():
            raise ToolError(f"{name}: the server is gone")
        asked = self._client.call_tool(name, dict(arguments))
        coming = asyncio.run_coroutine_threadsafe(asked, self._loop)
        try:
            result = coming.result(self._call_s)
        except TimeoutError as error:
            coming.cancel()
            raise ToolError(f"{name}: no answer in {self._call_s:g} s") from error
        except Exception as error:  # whatever a transport has for a server that died
            raise ToolError(f"{name}: the server failed: {_why(error)}") from error
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text


def _why(error: BaseException) -> str:
    """Return a line on an error, out of the groups that tasks wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    first = str(error).partition("\n")[0]
    return first or type(error).__name__
