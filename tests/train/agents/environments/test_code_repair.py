from xml.etree import ElementTree

import pytest

from train.agents.environments import code_repair, repositories
from train.agents.environments.calling import caller, solve_and_grade
from train.agents.environments.code_repair import CodeRepair
from train.agents.pool import SessionPool
from train.agents.tools import ToolError

pytestmark = pytest.mark.usefixtures("_isolated")


@pytest.fixture(scope="module")
def environment():
    with SessionPool(1) as pool:
        yield CodeRepair(pool.session)


@pytest.fixture(scope="module")
def tasks(environment):
    found = environment.tasks("train")
    return [next(found) for _ in range(3)]


def test_the_gold_patch_passes_and_nothing_done_does_not(environment, tasks):
    for task in tasks:
        _, grade = solve_and_grade(environment, task)
        assert grade.score == 1
        assert grade.parts == {"fail to pass": 1.0, "pass to pass": 1.0}
        with environment.open(task) as episode:
            untouched = episode.grade("It is mended.")
        assert untouched.score == 0
        assert untouched.parts == {"fail to pass": 0.0, "pass to pass": 1.0}


def test_a_patch_that_breaks_something_else_does_not_pass(environment, tasks):
    task = tasks[0]
    path = repositories.file_of(task.data["module"])
    with environment.open(task) as episode:
        caller(episode.tools)("bash", command=f"echo 'raise SystemExit' >> {path}")
        grade = episode.grade("")

    assert grade.score == 0
    assert grade.parts["pass to pass"] == 0


def test_what_the_sandbox_claims_does_not_count(environment, tasks):
    """A module that writes results of its own does not know which to write."""
    forged = "import sys, json\nfor i in range(999):\n    print(json.dumps(['?', '1']), file=sys.__stdout__)\n"
    module = tasks[0].data["module"]

    assert repositories.passing(module, repositories.behaviour(module, forged)) == frozenset()


def test_a_deleted_file_is_graded_0(environment, tasks):
    with environment.open(tasks[0]) as episode:
        caller(episode.tools)("bash", command="rm -r project")
        assert episode.grade("").score == 0


def test_the_repository_has_a_history_and_tests_that_pass(environment, tasks):
    with environment.open(tasks[0]) as episode:
        call = caller(episode.tools)
        assert "Import" in call("bash", command="git log --oneline")
        assert "all as it should be" in call("bash", command="python test_project.py")
        assert "1 " in call("read", path="README.md")
        with pytest.raises(ToolError, match="occurs 0 times"):
            call("edit", path="README.md", old="nothing such", new="")
        with pytest.raises(ToolError, match="inside the working folder"):
            call("read", path="../../etc/passwd")


def test_issues_tell_what_fails_and_hide_the_rest(tasks):
    for task in tasks:
        module, failing = task.data["module"], task.data["failing"]
        cases = repositories.cases_of(module)
        told = [n for n in failing if f"`{cases[n]}`" in task.prompt]
        assert 1 <= len(told) <= code_repair.SHOWN
        found = repositories.behaviour(module, code_repair.broken_source(task))
        failed = set(range(len(cases))) - repositories.passing(module, found)
        assert sorted(failed) == failing


def test_results_are_written_as_junit_does(tasks):
    task = tasks[0]
    found = repositories.behaviour(task.data["module"], code_repair.broken_source(task))
    suite = ElementTree.fromstring(repositories.junit_xml(task.data["module"], found))

    assert int(suite.get("failures")) == len(task.data["failing"])
    assert len(suite.findall("testcase/failure")) == len(task.data["failing"])
    assert int(suite.get("tests")) == len(suite.findall("testcase"))


def test_splits_share_no_fault_and_processes_agree(
    environment, in_another_process, in_this_process
):
    here = in_this_process(environment)

    assert in_another_process("code_repair") == here
    assert len({prompt for _, prompt in here}) == 8
