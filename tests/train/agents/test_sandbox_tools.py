import pytest

from train.agents import schemas
from train.agents.sandbox_tools import sandbox_tools
from train.agents.session import Session
from train.agents.tools import by_name

pytestmark = pytest.mark.usefixtures("_isolated")


def test_python_remembers_bash_sees_its_files_and_a_dead_sandbox_is_said():
    with Session() as session:
        tools = by_name(sandbox_tools(session, timeout_s=20.0))

        def call(name, **arguments):
            result = schemas.call(tools[name], arguments)
            return result.outcome, result.text

        assert call("python", code="x = 6 * 7; open('f', 'w').write('hi')")[0] == "ok"
        assert call("python", code="x") == ("ok", "42\n")
        assert call("bash", command="cat f") == ("ok", "hi")
        outcome, text = call("python", code="1 / 0")
        assert (outcome, "ZeroDivisionError" in text) == ("ok", True)
        assert call("python", source="1")[0] == "error"
        session.close()
        outcome, text = call("bash", command="true")
        assert (outcome, "the sandbox is dead" in text) == ("error", True)
