"""Policies at work, an endpoint among them: a server that says what a script says."""

import contextlib
import http.server
import importlib.util
import json
import threading
from pathlib import Path

import pytest

from dsv32_jax.generate.sampling import SamplingParams
from train.agents.attempt import Job, Limits
from train.evaluation import players
from train.evaluation.config import EndpointSettings, EvaluateConfig, PolicyConfig


def say(content="", *, thought="", calls=(), finish="stop", total=50):
    """An answer of the endpoint."""
    message = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": f"x{i}", "type": "function", "function": {"name": name, "arguments": text}}
            for i, (name, text) in enumerate(calls)
        ]
    usage = {"prompt_tokens": total - 7, "completion_tokens": 7, "total_tokens": total}
    choice = {"index": 0, "finish_reason": finish, "message": message}
    head = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
    return 200, {**head, "choices": [choice], "usage": usage}


ADD = say(thought="Add.", calls=[("add", '{"a": 0, "b": 2}')])


@pytest.fixture
def serve():
    """Return a context manager of a function from (requests so far, body) to (status, answer)."""

    @contextlib.contextmanager
    def run(script):
        bodies = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                bodies.append(body)
                status, answer = script(len(bodies), body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", bodies
        finally:
            server.shutdown()
            server.server_close()

    return run


@pytest.fixture
def jobs():
    path = Path(__file__).parents[1] / "agents" / "adding.py"
    spec = importlib.util.spec_from_file_location("adding", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    adding = module.make()
    return [Job(adding, task, SamplingParams(seed=5)) for task in adding.tasks("held_out")]


def test_an_endpoint_plays_with_the_settings_of_the_evaluation(serve, jobs):
    script = [ADD, say("2", thought="Done.")]
    with serve(lambda n, body: script[n - 1]) as (url, bodies):
        policy = PolicyConfig.from_text(f"{url}#m")
        cfg = EvaluateConfig(policies=(policy,), top_p=0.9, limits=Limits(steps=4, tokens=100))
        with players.open_player(cfg, policy) as play:
            ((place, found),) = play([jobs[0]._replace(params=cfg.params(seed=5))])

    assert place == 0
    assert found.solved
    assert (found.end, found.answer, found.steps, found.tokens) == ("answer", "2", 2, 14)
    first, second = bodies
    assert (first["model"], first["top_p"], first["temperature"], first["seed"]) == ("m", 0.9, 1, 5)
    assert first["tools"][0]["function"]["name"] == "add"
    assert second["messages"][1]["reasoning_content"] == "Add."
    assert (first["max_tokens"], second["max_tokens"]) == (100, 93)


def test_the_window_of_an_endpoint_is_managed(serve, jobs):
    script = [say(calls=[("add", '{"a": 0, "b": 2}')], total=90), say("2")]
    with serve(lambda n, body: script[n - 1]) as (url, bodies):
        policy = PolicyConfig.from_text(f"{url}#m")
        cfg = EvaluateConfig(
            policies=(policy,), context="discard_all", endpoint=EndpointSettings(window=100)
        )
        with players.open_player(cfg, policy) as play:
            ((_, found),) = play(jobs[:1])

    assert found.resets == 1
    assert [message["role"] for message in bodies[-1]["messages"]] == ["user"]


def test_what_is_not_sent_to_endpoints_is_refused():
    policy = PolicyConfig.from_text("http://127.0.0.1:1/v1#m")
    with pytest.raises(ValueError, match="top_k=3 is not sent to endpoints, of which m is one"):
        EvaluateConfig(policies=(policy,), top_k=3)
    with pytest.raises(ValueError, match="concurrency=0 must be positive"):
        EvaluateConfig(policies=(policy,), endpoint=EndpointSettings(concurrency=0))
