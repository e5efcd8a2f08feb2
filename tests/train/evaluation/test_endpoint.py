"""Episodes over HTTP, against a server that says what a script says."""

import contextlib
import http.server
import importlib.util
import json
import threading
from pathlib import Path

import pytest

from dsv32_jax.errors import UsageError, WorkFailedError
from dsv32_jax.generate.sampling import SamplingParams
from train.agents.attempt import Job, Limits
from train.agents.context import ContextConfig
from train.evaluation import endpoint
from train.evaluation.endpoint import EndpointLoop


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


def play(url, jobs, **changes):
    loop = EndpointLoop(url, "m", **({"limits": Limits(steps=4, tokens=100)} | changes))
    with contextlib.closing(loop):
        found = dict(loop.play(jobs))
    return [found[i] for i in range(len(jobs))]


def test_an_episode_of_calls_and_an_answer(serve, jobs):
    script = [ADD, say("2", thought="Done.")]
    with serve(lambda n, body: script[n - 1]) as (url, bodies):
        (found,) = play(url, jobs[:1])

    assert found.solved
    assert (found.end, found.answer, found.steps, found.tokens) == ("answer", "2", 2, 14)
    assert [call.result for call in found.calls] == ["2"]
    first, second = bodies
    assert first["messages"] == [{"role": "user", "content": "0+2?"}]
    assert first["tools"][0]["function"]["name"] == "add"
    assert (first["max_tokens"], second["max_tokens"]) == (100, 93)
    assert (first["seed"], second["seed"]) == (5, 6)
    assistant, result = second["messages"][1:]
    assert assistant["reasoning_content"] == "Add."
    assert assistant["tool_calls"][0]["id"] == result["tool_call_id"]
    assert result["content"] == "2"


def test_episodes_run_side_by_side_and_keep_their_places(serve, jobs):
    together = threading.Barrier(3, timeout=20)

    def script(n, body):
        if n <= 3:
            together.wait()  # none is answered before three have asked
        a = body["messages"][0]["content"].partition("+")[0]
        return say(str(int(a) + 2))

    with serve(script) as (url, _):
        found = play(url, jobs[:6], concurrency=3)

    assert [one.task for one in found] == [job.task.name for job in jobs[:6]]
    assert all(one.grade.score == 0.5 for one in found)


def test_a_cut_answer_a_refusal_and_the_limits_end_an_episode(serve, jobs):
    with serve(lambda n, body: say("never en", finish="length")) as (url, _):
        assert [one.end for one in play(url, jobs[:1])] == ["context"]
        assert play(url, jobs[:1], limits=Limits(tokens=7))[0].end == "tokens"
    with serve(lambda n, body: (400, {"error": {"message": "too long"}})) as (url, _):
        (found,) = play(url, jobs[:1])
        assert found.end == "refused"
        assert "too long" in found.note
        assert found.grade.score == 0
    with serve(lambda n, body: ADD) as (url, bodies):
        assert play(url, jobs[:1])[0].end == "steps"
        assert len(bodies) == 4


def test_a_busy_endpoint_is_asked_again(serve, jobs, monkeypatch):
    with serve(lambda n, body: (503, {}) if n <= 2 else say("2")) as (url, bodies):
        (found,) = play(url, jobs[:1])

    assert found.end == "answer"
    assert len(bodies) == 3


def test_an_endpoint_that_refuses_everything_stops_the_evaluation(serve, jobs):
    refusal = (401, {"error": {"message": "who are you"}})
    with (
        serve(lambda n, body: refusal) as (url, _),
        pytest.raises(WorkFailedError, match="who are you"),
    ):
        play(url, jobs[:3])


def test_a_missing_key_is_named(monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(UsageError, match="set the variable SOME_KEY"):
        EndpointLoop("http://x/v1", "m", limits=Limits(), api_key_env="SOME_KEY")


@pytest.mark.parametrize("strategy", ["summary", "discard_all"])
def test_a_full_window_begins_the_context_anew(serve, jobs, strategy):
    script = [
        say(calls=[("add", '{"a": 0, "b": 2}')], total=90),
        *([say("It is 2.")] if strategy == "summary" else []),
        say("2"),
    ]
    with serve(lambda n, body: script[n - 1]) as (url, bodies):
        (found,) = play(
            url, jobs[:1], window=100, context=ContextConfig(strategy=strategy, share=0.8)
        )

    assert found.solved
    assert found.resets == 1
    assert found.steps == len(script)
    last = bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["user"]
    assert ("It is 2." in last[0]["content"]) == (strategy == "summary")
    if strategy == "summary":
        assert "tools" not in bodies[1]


def test_reasoning_before_the_last_user_message_is_not_sent():
    turn = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    user = {"role": "user", "content": "u"}

    sent = endpoint.with_ids([user, turn, user, turn])

    assert "reasoning_content" not in sent[1]
    assert sent[3]["reasoning_content"] == "r"
    assert turn["reasoning_content"] == "r"
