import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv32_jax.errors import UsageError
from train.agents import schemas
from train.agents.mcp_tools import McpServer
from train.agents.tools import by_name

SERVER = Path(__file__).with_name("mcp_server.py")
STDIO = shlex.join([sys.executable, str(SERVER), "stdio"])


@pytest.fixture(scope="module")
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), "http", str(port)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.fixture(params=["stdio", "http"])
def where(request):
    return STDIO if request.param == "stdio" else request.getfixturevalue("address")


def call(server, name, *, tools=None, **arguments):
    result = schemas.call(by_name(tools or server.tools)[name], arguments)
    return result.outcome, result.text


def test_tools_of_a_server_are_listed_checked_and_called(where):
    with McpServer(where, start_s=60.0) as server:
        tools = by_name(server.tools)
        assert set(tools) == {"add", "fail", "sleep", "die"}
        assert tools["add"].description == "Add two numbers."
        assert tools["add"].parameters["required"] == ["a"]
        assert call(server, "add", a=2, b=3) == ("ok", "5")
        assert call(server, "add", a=2) == ("ok", "3")
        outcome, text = call(server, "add", a="x")
        assert (outcome, "'x' is not of type 'integer'" in text) == ("error", True)
        outcome, text = call(server, "fail")
        assert (outcome, "no luck" in text) == ("error", True)


def test_a_slow_call_ends_and_the_next_one_works(where):
    with McpServer(where, start_s=60.0, call_s=1.0) as server:
        outcome, text = call(server, "sleep", seconds=2.0)
        assert outcome == "error"
        assert "sleep: " in text
        time.sleep(1.5)  # a server that handles one call at a time is free again
        assert call(server, "add", a=1) == ("ok", "2")


def test_a_server_that_dies_is_an_error_of_its_calls():
    with McpServer(STDIO, start_s=60.0, call_s=5.0) as server:
        for name, arguments in (("die", {}), ("add", {"a": 1})):
            outcome, text = call(server, name, **arguments)
            assert outcome == "error"
            assert text.startswith(f"error: {name}: ")


@pytest.mark.parametrize("where", ["no-such-program --x", "http://127.0.0.1:9/mcp", "false"])
def test_a_server_that_can_not_be_reached_is_said_in_a_line(where):
    with pytest.raises(UsageError, match="does not start") as caught:
        McpServer(where, start_s=20.0)
    assert "\n" not in str(caught.value)
