import contextlib
import dataclasses
import re
import socket
import threading
import time

import httpx2
import numpy as np
import openai
import pytest

from dsv32_jax.cache import CacheConfig
from dsv32_jax.encoding import markup
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig
from dsv32_jax.serve.app import make_app
from dsv32_jax.serve.config import ServeConfig
from dsv32_jax.serve.server import Server
from dsv32_jax.serve.worker import EngineWorker
from dsv32_jax.tokenizer import ByteTokenizer

# One page a sequence, so that each step has one shape to compile.
MAX_LEN = 1024
ENGINE = EngineConfig(
    n_slots=3,
    max_len=MAX_LEN,
    prefill_chunk=256,
    max_waiting=8,
    cache=CacheConfig(n_pages=4, page_size=MAX_LEN),
)
CONFIG = ServeConfig(model="tiny", tools_block="## Tools\n{tool_schemas}")
CALL = (
    f"{markup.CALLS}>\n"
    f'{markup.INVOKE} name="add">\n'
    f'{markup.PARAMETER} name="a" string="false">1{markup.PARAMETER_END}>\n'
    f'{markup.PARAMETER} name="b" string="true">zwei{markup.PARAMETER_END}>\n'
    f"{markup.INVOKE_END}>\n"
    f"{markup.CALLS_END}>"
)
BROKEN = CALL.replace(markup.INVOKE_END, markup.PARAMETER_END)
END = [ByteTokenizer.eos_id]
# What is drawn after a prompt that has "script=NAME" in it.
SCRIPTS = {
    "hello": [*"Grüße, world".encode(), *END],
    "thought": [*f"So, so.{markup.THINK_END}Yes.".encode(), *END],
    "call": [*f"I add.\n\n{CALL}".encode(), *END],
    "thoughtcall": [*f"Add?{markup.THINK_END}I add.\n\n{CALL}".encode(), *END],
    "broken": [*f"I add.\n\n{BROKEN}".encode(), *END],
    "otherend": [*b"Hi.", ByteTokenizer.pad_id, *b"And on"],
    "grade": [*b"It is short.\nScore: 8", *END],
    "long": list(b"a" * MAX_LEN),
}


class ScriptedEngine(Engine):
    """Draws what a script says, if the prompt names one; all else is as it is."""

    def _collect(self, by_row, drawn):
        token = np.array(drawn.token)
        for row, sequence in enumerate(by_row):
            if sequence is None:
                continue
            prompt = bytes(t for t in sequence.tokens[: sequence.n_prompt] if t < 256)
            named = re.findall(rb"script=(\w+)", prompt)
            if named:
                script = SCRIPTS[named[-1].decode()]
                token[row, 0] = script[min(sequence.n_drawn, len(script) - 1)]
        return super()._collect(by_row, drawn._replace(token=token))


@dataclasses.dataclass
class Running:
    """A server in a thread."""

    port: int
    worker: EngineWorker
    engine: Engine
    server: Server
    client: openai.OpenAI
    http: httpx2.Client


@pytest.fixture(scope="session")
def tiny(cfg, new_model):
    return new_model(dataclasses.replace(cfg, vocab_size=264))


@pytest.fixture(scope="session")
def serve(tiny):
    """Return a context manager that runs a server: a real one, on a free port."""

    @contextlib.contextmanager
    def run(
        *,
        engine=ScriptedEngine,
        max_unread=1024,
        grace=5.0,
        send_buffer=None,
        tokenizer=None,
        **changes,
    ):
        tokenizer = tokenizer or ByteTokenizer()
        drawn_by = engine(tiny, ENGINE, eos_id=tokenizer.eos_id)
        worker = EngineWorker(drawn_by, max_unread=max_unread)
        cfg = dataclasses.replace(CONFIG, **changes)
        server = Server(make_app(cfg, worker, tokenizer), worker, grace=grace)
        listener = socket.create_server(("127.0.0.1", 0))
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: server.started)
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            httpx2.Client(base_url=url, timeout=60) as http,
        ):
            try:
                yield Running(port, worker, drawn_by, server, client, http)
            finally:
                server.should_exit = True
                thread.join(30)
        assert not thread.is_alive()

    return run


@pytest.fixture(scope="session")
def server(serve):
    """A server for tests that leave it as it was."""
    with serve() as running:
        yield running


@pytest.fixture(scope="session")
def until():
    return wait_for


def wait_for(condition, seconds=30.0):
    """Wait for something that another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
