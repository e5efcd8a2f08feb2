import functools
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dsv32_jax.errors import UsageError, WorkFailedError
from train.agents import isolation, runs
from train.agents.process import SandboxError
from train.rl import rewards
from train.rl.code import CodeConfig
from train.rl.judge import JudgeConfig, JudgeError
from train.rl.problems import Family, draw_problem
from train.rl.rewards import LengthConfig, Response, RewardConfig, Rewarder, Scored, Weights
from train.rl.tasks import Task

SUM = Task(name="sum", domain="sums", question="What is 2+2?", answer="4", verifier="numeric")
RIGHT = Response("Two and two. <answer>4</answer>", 10, False)
WRONG = Response("Two and two. <answer>5</answer>", 10, False)
JUDGE = JudgeConfig(base_url="http://127.0.0.1:9/v1", model="m")
FUNCTIONS = """
import os, signal, time

def length(task, text, tokens):
    if "nan" in text: return float("nan")
    if "none" in text: return None
    if "raise" in text: raise ValueError("no idea")
    if "hang" in text: time.sleep(600)
    if "kill" in text: os.kill(os.getpid(), signal.SIGKILL)
    return tokens / 100 + (task.domain == "sums")

not_callable = 3
"""


@pytest.fixture(scope="module")
def custom(tmp_path_factory):
    path = tmp_path_factory.mktemp("custom") / "own.py"
    path.write_text(FUNCTIONS)
    return f"{path}:length"


@pytest.fixture(scope="module")
def rewarder(tmp_path_factory, custom):
    """Everything but a judge."""
    cfg = RewardConfig(
        weights=(
            Weights(correct=1.0, format=0.25),
            Weights(domain="sums", correct=2.0, language=0.5, length=1.0, custom=0.0),
            Weights(domain="own", correct=0.0, custom=1.0),
        ),
        length=LengthConfig(free=10, limit=30),
        custom=custom,
        timeout_s=2.0,
        max_fault_share=0.5,
    )
    with Rewarder(cfg, tmp_path_factory.mktemp("rewards")) as made:
        yield made


def test_each_component_is_computed_and_weighted_by_domain(rewarder):
    sums, other = rewarder.score([SUM, replace(SUM, domain="x")], [RIGHT, RIGHT])

    components = {"correct": 1.0, "format": 1.0, "language": 1.0, "length": 0.0}
    assert sums == Scored(2.5, components)
    assert other == Scored(1.25, components)


@pytest.mark.parametrize(
    ("response", "total"),
    [
        (WRONG, 0.5),
        (RIGHT._replace(n_tokens=20), 2.0),
        (RIGHT._replace(n_tokens=30), 1.5),
        (RIGHT._replace(n_tokens=10**9), 1.5),
        (Response("два и два <answer>4</answer>", 10, False), 2.0),
        (RIGHT._replace(cut=True), 0.5),
        (Response("", 0, False), 0.5),
    ],
)
def test_rewards_of_a_domain(rewarder, response, total):
    (scored,) = rewarder.score([SUM], [response])

    assert scored.total == pytest.approx(total)


def test_problems_of_reasoning_gym_are_scored_in_the_workers(rewarder):
    tasks = [draw_problem(Family(name=name), 1) for name in ("chain_sum", "countdown")]
    responses = [Response(f"<answer>{task.answer}</answer>", 5, False) for task in tasks]

    assert [s.components["correct"] for s in rewarder.score(tasks, responses)] == [1, 1]


def test_an_answer_that_is_evaluated_does_not_leave_the_process(rewarder, tmp_path):
    task = draw_problem(Family(name="number_sorting"), 1)
    countdown = draw_problem(Family(name="countdown"), 1)
    text = f"open({str(tmp_path / 'out')!r}, 'w')"
    rewarder.submit(task, Response(f"<answer>{text}</answer>", 5, False)).result()
    rewarder.submit(countdown, Response(f"<answer>{text}</answer>", 5, False)).result()

    assert not list(tmp_path.iterdir())


def test_a_function_of_ones_own_counts_where_its_weight_is_not_0(rewarder):
    own, sums = rewarder.score([replace(SUM, domain="own"), SUM], [RIGHT, RIGHT])

    assert own.total == own.components["custom"] == pytest.approx(0.1)
    assert "custom" not in sums.components


@pytest.mark.parametrize(
    ("word", "fault", "message"),
    [
        ("nan", "not_a_number", "sum: custom is nan"),
        ("none", "raised", "sum: TypeError"),
        ("raise", "raised", "sum: ValueError: no idea"),
        ("hang", "hung", "sum: not done after 2 s"),
        ("kill", "killed", "sum: two workers died on it"),
    ],
)
def test_a_response_whose_reward_fails_has_none_and_the_others_do(rewarder, word, fault, message):
    task = replace(SUM, domain="own")
    bad, *good = rewarder.score([task] * 3, [Response(word, 5, False), RIGHT, RIGHT])

    assert (bad.total, bad.fault) == (None, fault)
    assert bad.message.startswith(message)
    assert all(math.isfinite(x) for x in bad.components.values())
    assert [one.total for one in good] == [pytest.approx(0.1)] * 2


def test_a_reference_that_can_not_be_read_is_no_reward(rewarder):
    bad, good = rewarder.score([replace(SUM, answer="four"), SUM], [RIGHT, RIGHT])

    assert (bad.total, bad.fault) == (None, "raised")
    assert "the reference 'four'" in bad.message
    assert good.total == 2.5


def test_an_answer_that_hangs_a_parser_is_killed(rewarder):
    task = replace(SUM, verifier="math", answer="4")
    tower = Response("<answer>9^{9^{9^{9}}}-9^{9^{9^{9}}}</answer>", 5, False)
    began = time.monotonic()
    bad, good = rewarder.score([task, task], [tower, RIGHT])

    assert time.monotonic() - began < 12
    assert bad.total in (None, 0.5)  # ended at a limit, or read as another number
    assert good.total == 2.5


def test_workers_killed_from_outside_do_not_lose_a_reward(rewarder):
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(rewarder.score, [SUM] * 60, [RIGHT] * 60)
        time.sleep(0.02)
        for worker in children():  # once: an item may lose one worker, and not two
            os.kill(worker, signal.SIGKILL)

    assert [one.total for one in found.result()] == [2.5] * 60


def children():
    import multiprocessing

    return [child.pid for child in multiprocessing.active_children() if child.name == "reward"]


def test_too_many_faults_stop_the_run(rewarder):
    task = replace(SUM, domain="own")
    responses = [Response("raise", 5, False)] * 2 + [Response("nan", 5, False), RIGHT]

    message = r"3 of 4 responses have no reward \(2 raised, 1 not_a_number\).*first: sum: ValueError: no idea"
    with pytest.raises(WorkFailedError, match=message):
        rewarder.score([task] * 4, responses)


def test_cut_responses_may_be_dropped_and_do_not_stop_the_run(tmp_path):
    with Rewarder(RewardConfig(cut="drop"), tmp_path) as rewarder:
        cut, whole = rewarder.score([SUM] * 2, [RIGHT._replace(cut=True), RIGHT])
        only = rewarder.score([SUM], [RIGHT._replace(cut=True)])

    assert (cut.total, cut.fault, whole.total) == (None, "cut", 1.0)
    assert only[0].fault == "cut"


def test_a_run_that_is_to_stop_does_not_wait_for_rewards(tmp_path, custom):
    cfg = RewardConfig(weights=(Weights(correct=0.0, custom=1.0),), custom=custom, timeout_s=60.0)
    began = time.monotonic()
    rewarder = Rewarder(cfg, tmp_path, should_stop=lambda: True)
    with pytest.raises(WorkFailedError, match="was stopped while responses were rewarded"):
        rewarder.score([SUM], [Response("hang", 5, False)])
    rewarder.__exit__()

    assert time.monotonic() - began < 20


class FakeJudge:
    """Scores by what the response says; the real one has its own tests."""

    spent = 7

    def score(self, task, response):
        if response == "unclear":
            raise JudgeError("no reply of 3")
        if response == "cap":
            raise WorkFailedError("the judge's cap is reached")
        return 0.5

    def close(self):
        """Hold nothing."""


@pytest.fixture
def judged(tmp_path, monkeypatch):
    monkeypatch.setattr(rewards, "Judge", lambda *a, **k: FakeJudge())
    cfg = RewardConfig(weights=(Weights(correct=0.0, judge=2.0),), judge=JUDGE, style="plain")
    with Rewarder(replace(cfg, max_fault_share=0.5), tmp_path) as made:
        yield made


def test_a_judge_scores_final_answers(judged):
    task = Task(name="t", domain="d", question="Write.", rubric="Short?")
    good, unclear, empty = judged.score(
        [task] * 3, [Response(text, 5, False) for text in ("fine", "unclear", " ")]
    )

    assert (good.total, good.components["judge"]) == (1.0, 0.5)
    assert (unclear.total, unclear.fault, unclear.message) == (
        None,
        "unjudged",
        "t: no reply of 3",
    )
    assert (empty.total, empty.components["judge"]) == (0.0, 0.0)  # there is nothing to judge
    assert judged.judge_tokens == 7


def test_a_judge_that_can_not_go_on_stops_the_run(judged):
    task = Task(name="t", domain="d", question="Write.", rubric="Short?")
    with pytest.raises(WorkFailedError, match="cap is reached"):
        judged.score([task], [Response("cap", 5, False)])


def test_figures_of_a_batch():
    good = functools.partial(Scored, components={"correct": 1.0})
    bad = Scored(None, {"correct": 0.0}, "hung", "m")
    groups = [[good(1.0), good(3.0)], [good(2.0), good(2.0 + 1e-9), bad], [bad, bad]]

    figures = rewards.summarise(groups)

    assert figures["reward/mean"] == pytest.approx(2.0)
    assert figures["reward/correct"] == pytest.approx(4 / 7)
    assert figures["reward/equal_groups"] == 2
    assert (figures["reward/faults"], figures["reward/faults/hung"]) == (3, 3)
    assert figures["reward/faults/cut"] == 0


@pytest.mark.parametrize("total", [math.inf, math.nan])
def test_a_sum_that_is_no_number_is_no_reward(total):
    weights = Weights(correct=0.0, custom=1e308)
    scored = rewards.compose(weights, SUM, {"custom": 1e308 if total == math.inf else total})

    assert (scored.total, scored.fault) == (None, "not_a_number")


@pytest.mark.parametrize("value", [1.5, -0.5])
def test_a_rule_out_of_its_range_is_no_reward(value):
    assert rewards.compose(Weights(), SUM, {"correct": value}).fault == "not_a_number"


@pytest.mark.parametrize(
    ("weights", "task", "message"),
    [
        (Weights(domain="x"), SUM, "no weights for the domain 'sums'"),
        (Weights(), replace(SUM, verifier=None), "sum has no verifier, but correct=1 counts"),
        (Weights(correct=0.0, judge=1.0), SUM, "sum has no rubric, but judge=1 counts"),
    ],
)
def test_tasks_that_can_not_be_rewarded_are_refused(weights, task, message):
    cfg = RewardConfig(weights=(weights,), judge=JUDGE if weights.judge else None)
    with pytest.raises(UsageError, match=message):
        rewards.require_scorable(cfg, [task])


CODE = replace(SUM, verifier="code", answer="", data={"tests": [{"stdin": "2", "stdout": "4"}]})


def test_programs_are_judged_in_the_sandbox(rewarder):
    if (problem := isolation.find_problem()) is not None:
        pytest.skip(f"no sandbox: {problem}")
    programs = ["print(2 * int(input()))", "print(5)", "import subprocess; print(4)"]
    responses = [Response(f"<answer>{program}</answer>", 10, False) for program in programs]
    responses.append(Response("no answer", 10, False))

    scored = rewarder.score([CODE] * 4, responses)

    assert [one.components["correct"] for one in scored] == [1, 0, 1, 0]
    assert [one.fault for one in scored] == [None] * 4


def test_a_sandbox_that_fails_is_a_fault_and_no_zero(rewarder, monkeypatch):
    def fail(*_, **__):
        raise SandboxError("no room")

    monkeypatch.setattr(runs, "run", fail)
    right = Response("<answer>print(2 * int(input()))</answer>", 10, False)

    scored = rewarder.score([CODE, SUM, SUM], [right, RIGHT, RIGHT])

    assert (scored[0].total, scored[0].fault) == (None, "sandbox")
    assert scored[0].message == "sum: no room"
    assert scored[1].total is not None


def test_programs_need_isolation_before_the_run(monkeypatch):
    monkeypatch.setattr(isolation, "find_problem", lambda: "bwrap not found")

    with pytest.raises(UsageError, match=r"can not be isolated here: bwrap not found\."):
        rewards.require_scorable(RewardConfig(), [SUM, CODE])
    rewards.require_scorable(RewardConfig(), [SUM])
    rewards.require_scorable(RewardConfig(code=CodeConfig(unsafe_local=True)), [CODE])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("own.py", "must be FILE.py:NAME"),
        ("nowhere.py:f", "does not run: FileNotFoundError"),
        ("{own}:missing", "has no function 'missing'"),
        ("{own}:not_callable", "has no function 'not_callable'"),
    ],
)
def test_a_function_that_is_not_there_is_named_before_the_run(place, message, custom, tmp_path):
    place = place.format(own=custom.rpartition(":")[0])
    cfg = RewardConfig(weights=(Weights(custom=1.0),), custom=place)
    with pytest.raises(UsageError, match=message):
        Rewarder(cfg, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": ()}, "rewards nothing"),
        ({"weights": (Weights(), Weights())}, r"weights of \* are given twice"),
        ({"weights": (Weights(judge=1.0),)}, "rewards.judge is None"),
        ({"weights": (Weights(length=1.0),)}, "rewards.length is None"),
        ({"judge": JUDGE}, "rewards.judge is set, but its weight is 0"),
        ({"length": LengthConfig(free=1, limit=2)}, "rewards.length is set, but its weight is 0"),
        ({"workers": 0}, "workers=0"),
        ({"timeout_s": 0.0}, "timeout_s=0.0"),
        ({"memory_mib": 1}, "memory_mib=1"),
        ({"max_fault_share": 1.5}, "max_fault_share=1.5"),
        ({"ray": "auto"}, "ray=auto must be HOST:PORT"),
        ({"ray": "ray://head:10001"}, "ray=ray://head:10001 must be HOST:PORT"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**changes)


def test_weights_are_read_off_a_command_line():
    assert Weights.from_text("math:format=0.5:correct=2") == Weights(
        domain="math", correct=2.0, format=0.5
    )
    with pytest.raises(ValueError, match="'size=1' must be component=weight"):
        Weights.from_text("math:size=1")
    with pytest.raises(ValueError, match="correct=x must be a number"):
        Weights.from_text("math:correct=x")


@pytest.mark.parametrize("changes", [{"correct": 0.0}, {"correct": math.inf}])
def test_weights_that_reward_nothing_are_refused(changes):
    with pytest.raises(ValueError, match="weights of"):
        Weights(**changes)


def test_a_length_range_is_in_order():
    with pytest.raises(ValueError, match="free=2 must be below limit=2"):
        LengthConfig(free=2, limit=2)


def test_without_ray_its_option_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(
        UsageError, match=r"rewards\.ray=head:6379 needs `pip install 'dsv32-jax\[ray"
    ):
        Rewarder(RewardConfig(ray="head:6379"), tmp_path)
