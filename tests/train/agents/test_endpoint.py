import http.server
import json
import threading

import pytest

from dsv32_jax.errors import UsageError, WorkFailedError
from dsv32_jax.generate.sampling import SamplingParams
from tests.train.agents.shop import Shop
from train.agents.attempt import Job, Limits
from train.agents.context import ContextConfig
from train.agents.endpoint import EndpointConfig, EndpointLoop
from train.rl import outage


class Server:
    """Answers chat completions with what `reply(request)` returns: a message, or a status."""

    def __init__(self):
        self.requests, self.reply = [], None
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(request)
                message = outer.reply(request)
                status = message if isinstance(message, int) else 200
                body = {"error": {"message": "no"}} if status != 200 else completion(message)
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.http.server_port}/v1"


def completion(message):
    message = {"role": "assistant", "content": "", **message}
    total = message.pop("total", 100)
    finish = message.pop("finish", "tool_calls" if message.get("tool_calls") else "stop")
    return {
        "id": "1", "object": "chat.completion", "created": 0, "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": total - 7, "completion_tokens": 7, "total_tokens": total},
    }  # fmt: skip


def calls(*pairs):
    return [
        {"id": f"x{i}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(pairs)
    ]


@pytest.fixture
def server():
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(outage, "POLL_S", 0.01)


def play(server, *, n=1, user=None, limits=Limits(), context=None, **changes):  # noqa: B008
    shop = Shop()
    cfg = EndpointConfig(base_url=server.address, model="m", **changes)
    job = Job(shop, next(shop.tasks("train")), SamplingParams(temperature=0.3, seed=4), user)
    with EndpointLoop(cfg, limits=limits, context=context) as loop:
        found = dict(loop.play([job] * n))
    assert shop.opened == shop.closed == n
    return [found[i] for i in range(n)]


def by_turn(*messages):
    def reply(request):
        said = sum(m["role"] == "assistant" for m in request["messages"])
        return dict(messages[min(said, len(messages) - 1)])

    return reply


PRICE = {"tool_calls": calls(("price", '{"item": "pear"}')), "reasoning_content": "look"}


def test_an_episode_keeps_its_reasoning_over_calls(server):
    server.reply = by_turn(PRICE, {"content": "3", "reasoning_content": "so"})
    found = play(server, n=3)
    assert [one.answer for one in found] == ["3"] * 3
    assert [(c.name, c.result) for c in found[0].calls] == [("price", "3")]
    assert (found[0].steps, found[0].tokens, found[0].solved) == (2, 14, True)
    later = next(r for r in server.requests if len(r["messages"]) == 3)
    user, said, result = later["messages"]
    assert said["reasoning_content"] == "look"
    assert said["tool_calls"][0]["id"] == result["tool_call_id"]
    assert {tool["function"]["name"] for tool in later["tools"]} == {"price", "sell", "crash"}
    assert (later["temperature"], later["seed"]) == (0.3, 4)
    assert user["content"] == "What is a pear?"


def test_a_new_user_message_drops_it(server):
    said = iter(["And now?", None])
    server.reply = by_turn(PRICE, {"content": "3", "reasoning_content": "so"})
    (found,) = play(server, user=lambda messages: next(said))
    last = server.requests[-1]["messages"]
    assert not any("reasoning_content" in m for m in last)
    assert last[1]["tool_calls"]
    assert last[2]["content"] == "3"
    assert found.messages[1]["reasoning_content"] == "look"


def test_calls_that_can_not_be_read_are_answered_and_sent_back_mended(server):
    server.reply = by_turn(
        {"tool_calls": calls(("price", '{"item'), ("what", "{}"))}, {"content": "3"}
    )
    (found,) = play(server)
    assert [c.outcome for c in found.calls] == ["unreadable", "unknown"]
    sent = server.requests[-1]["messages"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "price", "arguments": "{}"}
    assert sent[2]["content"] == "error: the arguments of price are no JSON object"
    assert [m["tool_call_id"] for m in sent[2:]] == [c["id"] for c in sent[1]["tool_calls"]]
    assert found.solved


def test_the_context_is_shortened_or_summed_up(server):
    turn = {**PRICE, "total": 900}
    server.reply = lambda r: (
        {"content": "pears: 3"}
        if "Call no tool" in r["messages"][-1]["content"]
        else {"content": "3"} if "pears: 3" in r["messages"][0]["content"] else turn
    )  # fmt: skip
    (found,) = play(server, window=1000, context=ContextConfig(strategy="summary"))
    assert (found.solved, found.resets, found.steps) == (True, 1, 3)
    assert "tools" not in server.requests[1]

    server.requests.clear()
    (found,) = play(
        server,
        window=1000,
        context=ContextConfig(strategy="discard_all"),
        limits=Limits(steps=3),
    )
    assert (found.end, found.resets) == ("steps", 2)
    assert [len(r["messages"]) for r in server.requests] == [1, 1, 1]


def test_limits_refusals_and_outages_have_their_reasons(server):
    server.reply = lambda request: PRICE
    assert play(server, limits=Limits(steps=2))[0].end == "steps"
    assert play(server, limits=Limits(tokens=10))[0].end == "tokens"
    server.reply = lambda request: {"content": "3", "finish": "length"}
    assert play(server)[0].end == "context"
    server.reply = lambda request: 400
    (found,) = play(server)
    assert (found.end, found.answer) == ("refused", "")
    assert "refuses the request" in found.note
    server.reply = lambda request: 401
    with pytest.raises(WorkFailedError, match="refuses 'm'"):
        play(server)
    server.reply = lambda request: 503
    with pytest.raises(WorkFailedError, match="is down for"):
        play(server, give_up_s=0.1)


def test_an_endpoint_that_comes_back_is_waited_for(server):
    replies = iter([503, 503, {"content": "3"}])
    server.reply = lambda request: next(replies)
    assert play(server)[0].solved


def test_what_is_missing_is_said(server, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(UsageError, match="NO_SUCH_KEY"):
        play(server, api_key_env="NO_SUCH_KEY")
    with pytest.raises(UsageError, match="window must be given"):
        play(server, context=ContextConfig(strategy="summary"))
