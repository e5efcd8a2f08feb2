"""The command, from a checkpoint to the page; and with scripted policies whose outcomes are known."""

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest

from configs import evaluate as default
from dsv32_jax import json_files
from dsv32_jax.errors import UsageError
from train import evaluate
from train.agents.trajectory import Trajectory
from train.evaluation import players
from train.evaluation.attempts import TrajectoryFile
from train.evaluation.config import PolicyConfig
from train.rl.problems import Family
from train.rl.task_source import TaskFile

ADDING = f"{Path(__file__).parent / 'agents' / 'adding.py'}:make"
PAIR = (PolicyConfig(name="good", place="a"), PolicyConfig(name="bad", place="b"))


@pytest.fixture
def cfg():
    """Two attempts at each of three tasks of each kind, one process for judging."""
    base = default.get_config()
    return dataclasses.replace(
        base,
        families=(Family(name="chain_sum", settings=(("max_terms", 2),)),),
        tasks=3,
        samples=2,
        ks=(1, 2),
        rewards=dataclasses.replace(base.rewards, workers=1),
        limits=dataclasses.replace(base.limits, steps=3, tokens=12),
        engine=dataclasses.replace(base.engine, slots=4, max_len=256),
    )


@pytest.fixture
def scripted(monkeypatch):
    """Make policies of scripts: "good" answers by the environment's solution, "bad" by 7; list the jobs played."""
    played = []

    @contextlib.contextmanager
    def open_player(cfg, policy):
        def play(jobs):
            for place, job in enumerate(jobs):
                played.append((policy.name, job.task.name, job.params.seed))
                with job.environment.open(job.task) as episode:
                    tools = {tool.name: tool for tool in episode.tools}
                    answer = "7"
                    if policy.name == "good":
                        answer = job.environment.solve(
                            job.task, lambda name, tools=tools, **a: tools[name].function(**a)
                        )
                    grade = episode.grade(answer)
                yield place, Trajectory(
                    task=job.task.name, environment=job.task.environment,
                    messages=({"role": "user", "content": job.task.prompt}, {"role": "assistant", "content": answer}),
                    calls=(), end="answer", answer=answer, steps=1, tokens=4, seconds=0.0, grade=grade,
                )  # fmt: skip

        yield play

    monkeypatch.setattr(players, "open_player", open_player)
    monkeypatch.setattr(players, "identity", lambda policy: {"place": policy.place})
    return played


def records_of(folder):
    """The lines without what no two runs share, in the order of their keys."""
    rows = json_files.read_lines(folder / "trajectories.jsonl")
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    return sorted(
        rows, key=lambda row: [str(row[k]) for k in ("policy", "environment", "task", "sample")]
    )


def test_policies_are_counted_rated_and_shown(cfg, scripted, tmp_path, capsys):
    both = dataclasses.replace(cfg, policies=PAIR, environments=(ADDING,))
    assert evaluate.main(both, tmp_path) == 0

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["good/all/success"] == summary["good/adding/pass@2"] == 1
    assert summary["bad/adding/success"] == 0
    assert summary["good/chain_sum/attempts"] == 6
    assert summary["good/rating"] > summary["bad/rating"]
    assert len(records_of(tmp_path)) == 2 * 2 * 3 * 2
    assert "| good | all | 6 | 12 | 1.000 [" in capsys.readouterr().out
    assert "<title>" in (tmp_path / "trajectories.html").read_text()
    assert {
        row["prompt"] if "prompt" in row else row["messages"][0]["content"]
        for row in records_of(tmp_path)
    }


def test_the_same_attempts_have_the_same_seeds_and_different_ones_others(cfg, scripted, tmp_path):
    evaluate.main(dataclasses.replace(cfg, policies=PAIR), tmp_path)
    seeds = {}
    for name, task, seed in scripted:
        seeds.setdefault(name, []).append((task, seed))

    assert seeds["good"] == seeds["bad"]
    assert len({seed for _, seed in seeds["good"]}) == 6


def test_more_samples_and_policies_make_only_what_is_new(cfg, scripted, tmp_path):
    evaluate.main(dataclasses.replace(cfg, policies=PAIR[:1]), tmp_path)
    assert len(scripted) == 6
    evaluate.main(dataclasses.replace(cfg, policies=PAIR, samples=3), tmp_path)

    assert len(scripted) == 6 + 3 + 9
    assert json.loads((tmp_path / "summary.json").read_text())["good/all/attempts"] == 9


def test_a_finished_evaluation_says_so_and_makes_nothing(cfg, scripted, tmp_path, capsys):
    one = dataclasses.replace(cfg, policies=PAIR[:1])
    evaluate.main(one, tmp_path)
    scripted.clear()
    capsys.readouterr()

    assert evaluate.main(one, tmp_path) == 0
    assert scripted == []
    assert "| good |" in capsys.readouterr().out


def test_an_evaluation_that_was_killed_goes_on_behind_its_last_whole_line(
    cfg, scripted, tmp_path, monkeypatch
):
    one = dataclasses.replace(cfg, policies=PAIR[:1])
    (tmp_path / "whole").mkdir()
    evaluate.main(one, tmp_path / "whole")
    add, added = TrajectoryFile.add, []

    def add_and_die(self, *args):
        add(self, *args)
        added.append(1)
        if len(added) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(TrajectoryFile, "add", add_and_die)
    scripted.clear()
    (tmp_path / "part").mkdir()
    with pytest.raises(KeyboardInterrupt):
        evaluate.main(one, tmp_path / "part")
    monkeypatch.setattr(TrajectoryFile, "add", add)
    with (tmp_path / "part" / "trajectories.jsonl").open("a") as file:
        file.write('{"policy": "good", "torn')

    assert evaluate.main(one, tmp_path / "part") == 0
    assert len(scripted) == 6
    assert records_of(tmp_path / "part") == records_of(tmp_path / "whole")
    summaries = [json.loads((tmp_path / f / "summary.json").read_text()) for f in ("part", "whole")]
    assert summaries[0] == summaries[1]


def test_a_file_of_tasks_is_attempted_whole_or_as_far_as_it_was_held_out(cfg, scripted, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        "".join(
            json.dumps({"question": f"{i}?", "answer": str(i), "verifier": "exact"}) + "\n"
            for i in range(40)
        )
    )
    whole = dataclasses.replace(
        cfg, policies=PAIR[:1], families=(), files=(TaskFile(path=str(path)),), tasks=50, samples=1, ks=(1,)
    )  # fmt: skip
    for name, fraction in (("all", 1.0), ("some", 0.3)):
        (tmp_path / name).mkdir()
        evaluate.main(dataclasses.replace(whole, held_out_fraction=fraction), tmp_path / name)

    rows = {name: records_of(tmp_path / name) for name in ("all", "some")}
    assert len(rows["all"]) == 40
    assert 3 <= len(rows["some"]) <= 25
    assert all(row["grade"]["score"] == 1 for row in rows["all"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ()}, "names nothing to evaluate"),
        ({"families": ()}, "leave nothing to attempt"),
        ({"environments": ("nowhere",)}, "there is no environment 'nowhere'"),
        ({"environments": (ADDING, ADDING)}, "share names: adding, adding"),
        (
            {"policies": (PolicyConfig(name="a", place="nowhere/b"),)},
            "policy a: no folder nowhere/b",
        ),
    ],
)
def test_what_can_not_be_evaluated_is_told(cfg, tmp_path, change, message, monkeypatch):
    if "families" in change or "environments" in change:
        monkeypatch.setattr(players, "identity", lambda policy: {"place": policy.place})
    with pytest.raises(UsageError, match=message):
        evaluate.main(dataclasses.replace(cfg, **({"policies": PAIR[:1]} | change)), tmp_path)


def test_another_seed_in_the_folder_is_refused(cfg, scripted, tmp_path):
    one = dataclasses.replace(cfg, policies=PAIR[:1])
    evaluate.main(one, tmp_path)

    with pytest.raises(UsageError, match=r"holds a run of another config \(seed: 0 -> 1"):
        evaluate.main(dataclasses.replace(one, seed=1), tmp_path)


def test_tasks_whose_words_have_changed_are_refused(cfg, scripted, tmp_path):
    path = tmp_path / "mine.jsonl"
    entry = {"name": "one", "question": "2?", "answer": "2", "verifier": "exact"}
    one = dataclasses.replace(
        cfg, policies=PAIR[:1], families=(), files=(TaskFile(path=str(path)),)
    )
    path.write_text(json.dumps(entry) + "\n")
    evaluate.main(one, tmp_path)
    path.write_text(json.dumps(entry | {"question": "3?"}) + "\n")

    with pytest.raises(UsageError, match="attempts at 'one' of mine with other words"):
        evaluate.main(dataclasses.replace(one, samples=3), tmp_path)


@pytest.fixture(scope="module")
def checkpoint(tiny_run, shared_folder, tmp_path_factory):
    """A run of one step, whose policy knows nothing."""
    from train import pretrain

    folder = tmp_path_factory.mktemp("checkpoint")
    short = dataclasses.replace(
        tiny_run, warmup=None, sparse=None, dense=dataclasses.replace(tiny_run.dense, steps=1)
    )
    assert pretrain.main(short, folder) == 0
    return folder


def test_a_checkpoint_is_evaluated_the_same_however_often_it_is_stopped(
    cfg, checkpoint, tmp_path, monkeypatch
):
    policy = PolicyConfig(name="tiny", place=str(checkpoint))
    one = dataclasses.replace(
        cfg, policies=(policy,), engine=dataclasses.replace(cfg.engine, dense=True)
    )
    for name in ("whole", "part"):
        (tmp_path / name).mkdir()
    assert evaluate.main(one, tmp_path / "whole") == 0
    add, added = TrajectoryFile.add, []

    def add_and_die(self, *args):
        add(self, *args)
        added.append(1)
        if len(added) in (1, 4):
            raise KeyboardInterrupt

    monkeypatch.setattr(TrajectoryFile, "add", add_and_die)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            evaluate.main(one, tmp_path / "part")
    assert evaluate.main(one, tmp_path / "part") == 0

    assert len(added) == 6
    assert records_of(tmp_path / "part") == records_of(tmp_path / "whole")
    rows = records_of(tmp_path / "whole")
    assert all(1 <= row["tokens"] <= 12 for row in rows)
    assert json.loads((tmp_path / "whole" / "policies.json").read_text())["tiny"]["step"] == "1"


def test_a_run_that_has_gone_on_is_no_longer_the_policy(cfg, tmp_path, monkeypatch, scripted):
    one = dataclasses.replace(cfg, policies=PAIR[:1])
    steps = iter("12")
    monkeypatch.setattr(players, "identity", lambda policy: {"step": next(steps)})
    evaluate.main(one, tmp_path)

    with pytest.raises(UsageError, match=r"policy good was .*'1'.* is .*'2'.* now; name the step"):
        evaluate.main(dataclasses.replace(one, samples=3), tmp_path)
