import pytest

from train.agents.environments import repositories
from train.agents.synthesis.pull_requests import (
    Pair,
    compare_runs,
    fault_of,
    language_of,
    read_junit,
)

ISSUE = (
    "Dates before 1970 are shown a day late.\n"
    + "To see it, ask for the weekday of 1969-12-31. " * 2
)


def diff(path, *lines):
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n" + "".join(
        f"{line}\n" for line in lines
    )


CODE = diff("src/dates.py", "-    return day", "+    return day - (year < 1970 and month > 1)")
TESTS = diff("tests/test_dates.py", "+assert weekday(1969, 12, 31) == 2")


def test_a_pair_that_keeps_to_the_rules_is_a_task():
    pair = Pair(issue=ISSUE, patch=CODE, test_patch=TESTS)

    assert fault_of(pair) == ""
    assert language_of(pair) == "Python"


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"issue": "Broken."}, "issue says too little"),
        ({"patch": ""}, "no patch"),
        ({"test_patch": ""}, "no test patch"),
        ({"patch": CODE + TESTS}, "patch touches tests"),
        ({"test_patch": TESTS + CODE}, "test patch touches code"),
        ({"patch": diff("src/dates.rs", "+x")}, "no one language of the eight"),
        ({"patch": CODE + diff("a.go", "+x")}, "no one language of the eight"),
        ({"patch": diff("a.py", *["+x"] * 401)}, "patch too large"),
        ({"patch": CODE + "GIT binary patch\n"}, "binary files"),
        (
            {"issue": ISSUE + "\n  return day - (year < 1970 and month > 1)\n"},
            "issue holds the patch",
        ),
    ],
)
def test_others_are_told_why_not(fields, fault):
    pair = Pair(**{"issue": ISSUE, "patch": CODE, "test_patch": TESTS} | fields)

    assert fault_of(pair) == fault


def suite(**cases):
    inside = {True: "", False: "<failure/>", None: "<skipped/>"}
    body = "".join(
        f'<testcase classname="c" name="{n}">{inside[p]}</testcase>' for n, p in cases.items()
    )
    return f"<testsuites><testsuite>{body}</testsuite></testsuites>"


def test_runs_are_compared_test_by_test():
    runs = compare_runs(
        suite(a=False, b=True, c=True, s=None), suite(a=True, b=True, d=True, s=None)
    )

    assert runs.fail_to_pass == {"c::a", "c::d"}
    assert runs.pass_to_pass == {"c::b"}
    assert runs.pass_to_fail == {"c::c"}
    assert not runs.accepted
    assert compare_runs(suite(a=False, b=True), suite(a=True, b=True)).accepted
    assert not compare_runs(suite(a=True), suite(a=True)).accepted


@pytest.mark.parametrize("text", ["", "<a>", '<!DOCTYPE x [<!ENTITY a "b">]><testsuite/>'])
def test_what_is_no_result_is_refused(text):
    with pytest.raises(ValueError, match="test results"):
        read_junit(text)


@pytest.mark.usefixtures("_isolated")
def test_the_repositories_own_results_are_read():
    good = list(repositories.expected_of("colorsys"))
    before = repositories.junit_xml("colorsys", ["wrong", *good[1:]])

    runs = compare_runs(before, repositories.junit_xml("colorsys", good))

    assert len(runs.fail_to_pass) == 1
    assert runs.accepted
