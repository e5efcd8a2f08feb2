import time

import pytest

from train.agents import isolation, runs
from train.agents.process import SandboxError
from train.rl import code
from train.rl.code import CodeConfig, CodeJudge
from train.rl.tasks import Task


@pytest.fixture(scope="module")
def judge():
    if (problem := isolation.find_problem()) is not None:
        pytest.skip(f"no sandbox: {problem}")
    return CodeJudge(CodeConfig(timeout_s=5.0)).judge


def task(*tests, **data):
    data = {"tests": list(tests), **data}
    return Task(name="t", domain="d", question="q", verifier="code", data=data)


SUM = task({"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 6", "stdout": "11"})
DOUBLE = task({"call": "double", "args": [[1, 2]], "result": [2, 4]})
SQUARE = task({"code": "assert square(3) == 9\nassert square(-2) == 4"})
GOOD_SUM = "print(sum(map(int, input().split())))"


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\na\n```\nor better\n```py\nb\n```", "b\n"),
        ("```python\nx = 1\n```\n```python\nnever closed", "x = 1\n"),
        ("```python\nnever closed", "```python\nnever closed"),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("", ""),
    ],
)
def test_the_last_closed_block_is_the_program(answer, program):
    assert code.extract(answer) == program


def test_an_answer_of_fences_is_read_quickly():
    started = time.monotonic()
    code.extract("```x\n" * 200_000)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("answer", "hidden"),
    [
        (GOOD_SUM, SUM),
        (f"```python\n{GOOD_SUM}\n```", SUM),
        (f"if __name__ == '__main__':\n  {GOOD_SUM}\n  print(' ')", SUM),
        ("def double(x): return [2 * y for y in x]", DOUBLE),
        ("print('talks')\ndef double(x): return tuple(2.0 * y for y in x)", DOUBLE),
        ("def square(x): return x * x", SQUARE),
    ],
)
def test_right_programs_get_one(judge, answer, hidden):
    assert judge(answer, hidden) == 1


@pytest.mark.parametrize(
    ("answer", "hidden"),
    [
        ("print(3)", SUM),
        ("print(3", SUM),
        ("", SUM),
        (GOOD_SUM + "; import sys; sys.exit(1)", SUM),
        (GOOD_SUM + "; 1/0", SUM),
        ("print('3 ')\nprint('x')", SUM),
        ("import os, signal; print(3, flush=True); os.kill(os.getpid(), signal.SIGKILL)", SUM),
        ("def double(x): return x", DOUBLE),
        ("def double(x): return [2, 4, 6]", DOUBLE),
        ("def double(x): return {2, 4}", DOUBLE),
        ("def twice(x): return [2, 4]", DOUBLE),
        ("print('[2, 4]')", DOUBLE),
        ("import os; os.write(1, b'[2, 4]'); os._exit(1)", DOUBLE),
        ("def double(x): return [True, 4]", task({"call": "double", "args": [1], "result": [1, 4]})),
        ("def f(): return 1", task({"call": "f", "result": True})),
        ("def f(): return '1'", task({"call": "f", "result": 1})),
        ("def f(): return float('nan')", task({"call": "f", "result": 1.0})),
        ("def f(): return 10 ** 400", task({"call": "f", "result": 1.0})),
        ("def f(): return {'a': 1, 'b': 2}", task({"call": "f", "result": {"a": 1}})),
        ("def f():\n  x = []\n  for _ in range(900): x = [x]\n  return x", task({"call": "f", "result": 1})),
        ("def square(x): return 9", SQUARE),
        ("square = 3", SQUARE),
    ],
)  # fmt: skip
def test_wrong_programs_get_nothing(judge, answer, hidden):
    assert judge(answer, hidden) == 0


@pytest.mark.parametrize(
    "answer",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "class Any:\n  def __eq__(self, other): return True\ndef double(x): return Any()",
        "import os, json; os.write(1, b'[2, 4]'); os._exit(0)",
        "import atexit, os; atexit.register(os._exit, 0)",
        "import sys; sys.settrace(lambda *_: None); sys.excepthook = lambda *_: None",
        "print(open('test.json').read())",
        "import glob; [print(open(p, 'rb').read()) for p in glob.glob('/proc/[0-9]*/cmdline')]",
    ],
)
def test_programs_that_know_nothing_of_what_is_expected_get_nothing(judge, answer):
    for hidden in (SUM, SQUARE):
        assert judge(answer, hidden) == 0


def test_what_is_expected_never_enters_the_sandbox(monkeypatch):
    seen = []

    def run(argv, *, stdin, files, **_):
        seen.append(repr((argv, stdin, files)))
        return runs.Result(
            ended="exited", exit_code=0, stdout=b"", stderr=b"started\n", seconds=0.0
        )

    monkeypatch.setattr(runs, "run", run)
    judge = CodeJudge(CodeConfig()).judge
    hidden = task(
        {"stdin": "known", "stdout": "hidden"},
        {"call": "f", "args": ["known"], "result": "hidden"},
        partial=True,
    )

    assert judge("program", hidden) == 0
    assert len(seen) == 2
    assert all("known" in one and "hidden" not in one for one in seen)


def test_the_share_that_passes_counts_where_that_is_asked_for(judge):
    assert judge("print(3)", task(*SUM.data["tests"], partial=True)) == 0.5


def test_the_first_failure_ends_it_where_it_is_not(monkeypatch):
    ran = []

    def run(*_, **__):
        ran.append(1)
        return runs.Result(
            ended="exited", exit_code=1, stdout=b"", stderr=b"started\n", seconds=0.0
        )

    monkeypatch.setattr(runs, "run", run)

    assert CodeJudge(CodeConfig()).judge("x", SUM) == 0
    assert len(ran) == 1


def test_a_task_sets_its_own_limits(judge):
    started = time.monotonic()
    assert judge("while True: pass", task(*SUM.data["tests"], timeout_s=1)) == 0
    assert time.monotonic() - started < 8
    greedy = "x = bytearray(300 * 2**20); import time; time.sleep(0.5); " + GOOD_SUM
    assert judge(greedy, SUM) == 1
    assert judge(greedy, task(*SUM.data["tests"], memory_mib=128)) == 0


def test_too_much_output_is_wrong_and_ends_it(judge):
    started = time.monotonic()
    assert judge("print(3)\nwhile True: print(' ' * 1000)", SUM) == 0
    assert time.monotonic() - started < 4


@pytest.mark.parametrize("stderr", [b"", b"bash: fork: Resource temporarily unavailable\n"])
def test_a_program_that_was_not_started_is_no_failure_of_its_own(monkeypatch, stderr):
    result = runs.Result(ended="exited", exit_code=1, stdout=b"", stderr=stderr, seconds=0.0)
    monkeypatch.setattr(runs, "run", lambda *_, **__: result)
    with pytest.raises(SandboxError, match="was not started"):
        CodeJudge(CodeConfig()).judge(GOOD_SUM, SUM)


def test_it_stops_between_tests():
    with pytest.raises(SandboxError, match="stopped"):
        CodeJudge(CodeConfig(), should_stop=lambda: True).judge(GOOD_SUM, SUM)


def test_unsafe_local_judges_the_same():
    judge = CodeJudge(CodeConfig(unsafe_local=True)).judge

    assert [judge(answer, SUM) for answer in (GOOD_SUM, "print(3)")] == [1, 0]


@pytest.mark.parametrize("changes", [{"sandboxes": 0}, {"timeout_s": 0.0}, {"memory_mib": 1}])
def test_settings_that_do_not_fit_are_refused(changes):
    ((name, _),) = changes.items()
    with pytest.raises(ValueError, match=f"{name}=.* must be"):
        CodeConfig(**changes)
