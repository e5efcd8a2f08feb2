import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from train.agents.environments.synthetic import Synthetic
from train.agents.synthesis import pipeline
from train.agents.synthesis.checking import run_here
from train.agents.synthesis.endpoint import EndpointAuthor
from train.agents.synthesis.pipeline import AuthorError, Proposal, make_with
from train.agents.synthesis.sandboxed import run_sandboxed
from train.agents.synthesis.store import Store
from train.agents.synthesis.trial import EndpointPolicy, rate
from train.agents.synthesis.worlds import to_json


class Scripted:
    """An author that has its replies ready."""

    def __init__(self, worlds, proposals):
        self.worlds, self.proposals, self.complaints = list(worlds), list(proposals), []

    def world(self, category, name, complaint):
        self.complaints.append(complaint)
        return self._next(self.worlds)

    def propose(self, world, earlier, difficulty):
        return self._next(self.proposals)

    def repair(self, proposal, complaint):
        self.complaints.append(complaint)
        return self._next(self.proposals)

    def _next(self, replies):
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


def test_worlds_and_tasks_are_mended_until_they_stand(shop, draft):
    broken = dataclasses.replace(shop, script="CREATE TABLE")
    wrong = dataclasses.replace(draft, solution=draft.solution.replace("min", "max"))
    author = Scripted([broken, shop], [Proposal(shop, wrong), Proposal(shop, draft)])

    made = make_with(author, "shop", "shop-0", 1, run_here)

    assert [d.prompt for d, _ in made.tasks] == [draft.prompt]
    assert made.rejected == {"solution does not pass": 1}
    assert author.complaints[0] == ""
    assert "script fails" in author.complaints[1]
    assert "solution does not pass" in author.complaints[2]


def test_a_harder_task_may_add_tools_but_not_change_tables(shop, draft):
    fewer = dataclasses.replace(shop, tools=shop.tools[:2])
    moved = dataclasses.replace(shop, script=shop.script.replace("317", "318"))
    author = Scripted([fewer], [Proposal(moved, draft), Proposal(shop, draft)])

    made = make_with(author, "shop", "shop-0", 1, run_here)

    assert made.rejected == {"tables changed": 1}
    assert made.added == 1
    assert len(made.tasks) == 1


def test_an_author_that_fails_is_given_up(shop, draft):
    assert make_with(Scripted([AuthorError("x")] * 9, []), "a", "b", 1, run_here) is None
    wrong = dataclasses.replace(draft, solution="import os")
    author = Scripted([shop], [Proposal(shop, wrong)] * 9)
    made = make_with(author, "a", "b", 1, run_here)
    assert made.tasks == []
    assert made.rejected == {"solution not allowed": pipeline.REPAIRS + 1}


@pytest.mark.usefixtures("_isolated")
def test_a_models_solutions_run_in_the_sandbox(shop, draft):
    outcomes = run_sandboxed(
        shop, [draft.solution, "import os", draft.solution.replace("317", "1")]
    )

    assert outcomes == run_here(
        shop, [draft.solution, "import os", draft.solution.replace("317", "1")]
    )
    slow = "def solve(call):\n    return sum(1 for i in range(10**12)) + len(call('list'))\n"
    assert "did not come to an end" in run_sandboxed(shop, [slow], timeout_s=2.0)[0].error


@pytest.fixture
def endpoint():
    """A server that gives chat completions out of a list; yields its address, the list, and what it was asked."""
    replies, asked = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            message = {"role": "assistant", **replies.pop(0)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [choice],
            }
            body = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", replies, asked
    server.shutdown()
    thread.join()
    server.server_close()


def fenced(data):
    return {"content": f"Here it is.\n```json\n{json.dumps(data)}\n```"}


@pytest.mark.usefixtures("_isolated")
def test_an_endpoint_is_an_author(endpoint, shop, draft):
    url, replies, asked = endpoint
    world, task = json.loads(to_json(shop)), json.loads(to_json(draft))
    tools = world["tools"]
    replies += [
        {"content": "no JSON"},
        fenced({"script": world["script"], "tools": tools[:2]}),
        fenced({"task": {**task, "solution": "def solve(call):\n    return 1\n"}}),
        fenced({"task": task, "tools": tools[2:]}),
    ]

    made = make_with(EndpointAuthor(url, "m"), "a shop", "shop-0", 1, run_sandboxed)

    assert [d.prompt for d, _ in made.tasks] == [draft.prompt]
    assert (made.world.category, len(made.world.tools), made.added) == ("a shop", 3, 1)
    assert "the reply holds no JSON" in asked[1]["messages"][-1]["content"]
    assert "solution not allowed" in asked[3]["messages"][-1]["content"]


def test_a_policy_behind_an_endpoint_is_tried(endpoint, shop, draft, tmp_path):
    url, replies, asked = endpoint
    with Store(tmp_path, create=True) as store:
        made = make_with(Scripted([shop], [Proposal(shop, draft)]), "shop", "shop-0", 1, run_here)
        store.add(0, made)
    environment = Synthetic(tmp_path)
    (task,) = [*environment.tasks("train"), *environment.tasks("held_out")]

    def call(name, **arguments):
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        }

    replies += [call("buy", good="pen"), {"content": "317"}]  # solves it
    replies += [call("buy", good="hat"), call("nothing"), {"content": "317"}]  # does not
    assert rate(EndpointPolicy(url, "m").attempt, environment, task, 2) == 1
    assert asked[3]["messages"][-1]["content"] == "error: no such good"
    assert {t["function"]["name"] for t in asked[0]["tools"]} == {"list", "get", "buy"}
