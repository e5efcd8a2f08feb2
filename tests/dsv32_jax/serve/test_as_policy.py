import contextlib

from train.agents.attempt import Job, Limits
from train.agents.environment import Grade, Task
from train.agents.tools import Tool
from train.evaluation.endpoint import EndpointLoop

NUMBER = {"type": "integer"}
SCHEMA = {
    "type": "object",
    "properties": {"a": NUMBER, "b": {"type": "string"}},
    "required": ["a", "b"],
}


class Sums:
    """One task, whose prompt names a script of the server."""

    name, summary = "sums", "sums"
    tools = (Tool(name="add", description="Add.", parameters=SCHEMA, function="{a}{b}".format),)

    def tasks(self, split, seed=0):
        yield Task(name="one", environment="sums", prompt="script=thoughtcall")

    def open(self, task):
        return contextlib.nullcontext(self)

    def solve(self, task, call):
        raise NotImplementedError

    def grade(self, answer):
        return Grade(score=float(answer == "1zwei"))


def test_a_checkpoint_behind_the_server_plays_episodes(server):
    (task,) = Sums().tasks("held_out")
    loop = EndpointLoop(
        f"http://127.0.0.1:{server.port}/v1", "tiny", limits=Limits(steps=2), thinking=True
    )
    with contextlib.closing(loop):
        ((_, found),) = loop.play([Job(Sums(), task)])

    assert found.end == "steps"
    assert [(call.name, call.result) for call in found.calls] == [("add", "1zwei")] * 2
    assert found.messages[1]["reasoning_content"] == "Add?"
    assert found.tokens > 200  # bytes
