import json

import pytest

from train import synthesize
from train.agents.environments.synthetic import Synthetic


def test_a_folder_is_filled_and_filled_on(tmp_path, capsys):
    argv = ["--out", str(tmp_path), "--author", "small", "--jobs", "1", "--tasks", "2"]
    assert synthesize.main([*argv, "--worlds", "3"]) == 0
    assert synthesize.main([*argv, "--worlds", "5"]) == 0

    out = capsys.readouterr().out
    assert "no --policy: tasks that one always or never solves were not looked for" in out
    assert "5 worlds, 10 tasks" in out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["worlds"], summary["tasks"]) == (5, 10)
    report = (tmp_path / "report.md").read_text()
    assert "## Difficulties" in report
    assert "def solve(call):" in report

    at_once = tmp_path / "at_once"
    assert synthesize.main(["--out", str(at_once), *argv[2:], "--worlds", "5"]) == 0
    names = [[t.name for t in Synthetic(f).tasks("train")] for f in (tmp_path, at_once)]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--worlds", "0"], "--worlds 0 must be at least 1"),
        (["--author", "endpoint"], "--author endpoint needs --base-url, --model and --categories"),
        (["--model", "x"], "are for --author endpoint"),
        (["--policy", "http://x"], "--policy and --policy-model go together"),
        (["--held-out-categories", "zoo"], "not zoo"),
        (["--authors", "small"], "did you mean --author"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, argv, message):
    assert synthesize.main(["--out", str(tmp_path / "x"), *argv]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_other_settings_need_another_folder(tmp_path, capsys):
    argv = ["--out", str(tmp_path), "--author", "small", "--jobs", "1", "--worlds", "1"]
    assert synthesize.main(argv) == 0
    assert synthesize.main([*argv, "--seed", "1"]) == 2
    assert "was begun with seed=0, not 1" in capsys.readouterr().err
