import dataclasses

import pytest

from train.agents.environments.calling import caller
from train.agents.synthesis.database import Database, WorldError, build, is_same
from train.agents.synthesis.worlds import Change, SqlTool, Verifier
from train.agents.tools import ToolError


@pytest.fixture
def opened(shop):
    with Database(shop) as database:
        yield database


def with_tool(world, **fields):
    tool = SqlTool(name="try", description="", **fields)
    return dataclasses.replace(world, tools=(*world.tools, tool))


def test_tools_read_and_change_their_own_copy(shop, opened):
    call = caller(opened.tools())

    assert call("list") == ["cap", "ink", "pen"]
    assert call("get", good="ink") == {"name": "ink", "price": 925, "stock": 1}
    assert call("buy", good="ink") == "done"
    assert call("get", good="ink")["stock"] == 0
    with Database(shop) as other:
        assert other.state() != opened.state()


def test_guards_refuse_with_their_words(opened):
    call = caller(opened.tools())

    with pytest.raises(ToolError, match="no such good"):
        call("buy", good="hat")
    with pytest.raises(ToolError, match="out of stock"):
        call("buy", good="cap")


@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH '/tmp/x.db' AS x",
        "PRAGMA writable_schema = 1",
        "DROP TABLE good",
        "CREATE TABLE x (a)",
        "SELECT load_extension('x')",
        "SELECT random()",
        "SELECT datetime('now')",
        "SELECT strftime('%s', 'now')",
        "SELECT current_timestamp",
        "DELETE FROM before.good",
        "UPDATE sqlite_schema SET sql = ''",
        "VACUUM INTO '/tmp/x.db'",
    ],
)
def test_sql_that_leads_out_is_refused(shop, sql):
    with Database(with_tool(shop, steps=(sql,))) as database:
        with pytest.raises(ToolError, match="try does not work so"):
            caller(database.tools())("try")
        assert len(database.rows("good")) == 3
    if not sql.startswith("CREATE"):
        with pytest.raises(WorldError):
            build(f"CREATE TABLE good (a); {sql};")


def test_a_statement_without_end_is_ended(shop):
    forever = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    )
    with (
        Database(with_tool(shop, result=forever)) as database,
        pytest.raises(ToolError, match="interrupted"),
    ):
        caller(database.tools())("try")


def test_a_failed_call_changes_nothing(shop):
    steps = ("UPDATE good SET stock = 9", "UPDATE nothing SET a = 1")
    with Database(with_tool(shop, steps=steps)) as database:
        before = database.state()
        with pytest.raises(ToolError):
            caller(database.tools())("try")
        assert database.state() == before


def test_answer_and_state_are_both_judged(opened, draft):
    assert opened.grade(draft.verifier, "317").parts == {"answer": 1.0, "state": 0.0}
    caller(opened.tools())("buy", good="pen")
    assert opened.grade(draft.verifier, "317").score == 1
    assert opened.grade(draft.verifier, "318").score == 0
    caller(opened.tools())("buy", good="ink")
    assert opened.grade(draft.verifier, "317").parts["state"] == 0


def test_tables_that_are_not_named_must_stay(opened):
    caller(opened.tools())("buy", good="pen")

    assert opened.grade(Verifier(answer="x", changes={}), "x").score == 0
    assert opened.grade(Verifier(answer="x", changes=None), "x").score == 1


def test_checks_see_answer_and_both_states(opened):
    sold = (
        "SELECT (SELECT sum(stock) FROM before.good) - (SELECT sum(stock) FROM good) = :answer + 0"
    )
    verifier = Verifier(changes=None, checks={"sold": sold})
    caller(opened.tools())("buy", good="pen")

    assert opened.grade(verifier, "1").score == 1
    assert opened.grade(verifier, "2").score == 0


def test_an_answer_that_is_no_json_is_the_policys_fault(opened):
    verifier = Verifier(changes=None, checks={"two": "SELECT json_array_length(:answer) = 2"})

    assert opened.grade(verifier, "[1, 2]").score == 1
    assert opened.grade(verifier, "[1,").score == 0


@pytest.mark.parametrize(
    "verifier",
    [
        Verifier(changes=None),
        Verifier(answer="x", changes={"nothing": Change()}),
        Verifier(changes=None, checks={"a": "SELECT x FROM nothing"}),
    ],
)
def test_a_verifier_that_does_not_work_is_told(opened, verifier):
    with pytest.raises(WorldError):
        opened.grade(verifier, "x")


@pytest.mark.parametrize(
    ("answer", "reference", "compare", "same"),
    [
        (" Blue  hill. ", "blue hill", "exact", True),
        ("blue", "blue hill", "exact", False),
        ("12.0", "12", "number", True),
        ("12.1", "12", "number", False),
        ("nan", "12", "number", False),
        ("twelve", "12", "number", False),
        ('["b", "a"]', '["A", "b"]', "set", True),
        ('["b"]', '["A", "b"]', "set", False),
        ("b", '["b"]', "set", False),
    ],
)
def test_answers_are_compared_as_asked_for(answer, reference, compare, same):
    assert is_same(answer, reference, compare) is same
