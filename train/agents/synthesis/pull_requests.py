"""The report's code-agent pipeline, where it needs no model: rules for issues and patches, and what test runs accept.

Mining the pairs and installing their projects is not done here: there is no network in which to do either.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from xml.etree import ElementTree

LANGUAGES = {
    ".py": "Python", ".java": "Java", ".js": "JavaScript", ".jsx": "JavaScript", ".ts": "TypeScript",
    ".tsx": "TypeScript", ".c": "C", ".h": "C", ".cc": "C++", ".cpp": "C++", ".hpp": "C++", ".go": "Go",
    ".php": "PHP",
}  # fmt: skip
SHORTEST_ISSUE = 80  # characters: less says nothing that could be worked from
LONGEST_PATCH = 400  # changed lines
MOST_FILES = 12
TEST_PATH = re.compile(
    r"(^|/)(tests?|__tests__|spec)(/|$)|(^|/)test_[^/]*$|[._]test\.\w+$|Test\.java$|_spec\.\w+$"
)
HEADER = re.compile(r"^diff --git a/(.*) b/(.*)$", re.MULTILINE)
CHANGED = re.compile(r"^[+-](?![+-]{2} )", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An issue and the change that closed it.

    Attributes:
        issue: Its text, title first.
        patch: The change to the code, as a unified diff of git.
        test_patch: The change to the tests, the same.
    """

    issue: str
    patch: str
    test_patch: str


def fault_of(pair: Pair) -> str:
    """Return why a pair is no task, "" if no rule is against it.

    Args:
        pair: The pair.

    Returns:
        A few words, the same for the same fault.
    """
    code, tests = files_of(pair.patch), files_of(pair.test_patch)
    if len(pair.issue.strip()) < SHORTEST_ISSUE:
        return "issue says too little"
    if not code or not tests:
        return "no patch" if not code else "no test patch"
    if any(TEST_PATH.search(path) for path in code):
        return "patch touches tests"
    if not all(TEST_PATH.search(path) for path in tests):
        return "test patch touches code"
    if language_of(pair) == "":
        return "no one language of the eight"
    if len(code) > MOST_FILES or len(CHANGED.findall(pair.patch)) > LONGEST_PATCH:
        return "patch too large"
    if "GIT binary patch" in pair.patch + pair.test_patch:
        return "binary files"
    if _added(pair.patch) & set(map(str.strip, pair.issue.splitlines())):
        return "issue holds the patch"
    return ""


def files_of(patch: str) -> list[str]:
    """Return the paths that a diff of git changes, as they are afterwards."""
    return [found[1] for found in HEADER.findall(patch)]


def language_of(pair: Pair) -> str:
    """Return the language that a patch is in, "" if it is none of the eight or more than one."""
    suffixes = {PurePosixPath(path).suffix for path in files_of(pair.patch)}
    found = {LANGUAGES[suffix] for suffix in suffixes if suffix in LANGUAGES}
    return found.pop() if len(found) == 1 else ""


def _added(patch: str) -> set[str]:
    """Return the lines that a diff adds and that are long enough to be nobody else's."""
    lines = (line[1:].strip() for line in patch.splitlines() if re.match(r"\+(?!\+\+ )", line))
    return {line for line in lines if len(line) >= 30}


@dataclass(frozen=True)
class Runs:
    """What became of tests between two runs.

    Attributes:
        fail_to_pass: Names; a test that was not there before failed.
        pass_to_pass: Names.
        pass_to_fail: Names; a test that is gone fails.
    """

    fail_to_pass: frozenset[str]
    pass_to_pass: frozenset[str]
    pass_to_fail: frozenset[str]

    @property
    def accepted(self) -> bool:
        """Whether the change mends something and breaks nothing."""
        return bool(self.fail_to_pass) and not self.pass_to_fail


def read_junit(text: str) -> Mapping[str, bool]:
    """Read test results.

    Args:
        text: XML as JUnit, pytest and others write it.

    Returns:
        Test -> whether it passed; skipped tests are left out, a name that is there twice passes if both do.

    Raises:
        ValueError: If it is no such XML.
    """
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("test results must not define entities")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"test results are no XML: {error}") from error
    found: dict[str, bool] = {}
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        if case.find("skipped") is None:
            passed = case.find("failure") is None and case.find("error") is None
            found[name] = found.get(name, True) and passed
    return found


def compare_runs(before: str, after: str) -> Runs:
    """Compare the runs before and after the gold patch, both with the test patch in.

    Args:
        before: JUnit XML.
        after: JUnit XML.

    Returns:
        What became of each test.

    Raises:
        ValueError: If one is no such XML.
    """
    old, new = read_junit(before), read_junit(after)
    passing = {name for name, passed in old.items() if passed}
    now = {name for name, passed in new.items() if passed}
    return Runs(frozenset(now - passing), frozenset(now & passing), frozenset(passing - now))
