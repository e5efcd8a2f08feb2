import io

import pytest

from train.agents.environments.__main__ import main


def test_list_names_every_environment(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name in (
        "trips",
        "interpreter",
        "search",
        "code_repair",
        "synthetic:FOLDER",
        "reasoning:FAMILY",
        "bfcl:FOLDER",
    ):
        assert name in out


def test_show_and_solve(capsys):
    assert main(["show", "trips", "--task", "2"]) == 0
    assert "get_weather_by_city_date(city, date)" in capsys.readouterr().out
    assert main(["solve", "search", "--split", "held_out"]) == 0
    out = capsys.readouterr().out
    assert "open {" in out
    assert out.rstrip().endswith("grade: 1")


def test_play_by_hand(capsys, monkeypatch):
    typed = 'tools\nget_all_cities\nget_all_hotels_by_city {"city": 1}\nget_city_transport {no\n\nanswer []\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))

    assert main(["play", "trips"]) == 1

    out = capsys.readouterr().out
    assert '["' in out
    assert "! get_all_hotels_by_city: city must be of type string" in out
    assert "! arguments are JSON" in out
    assert "grade: 0" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show"], "show takes the name of an environment"),
        (["list", "trips"], "list takes no name"),
        (["show", "tripss"], "did you mean trips"),
        (["show", "synthetic:/nowhere"], "holds no synthetic environments"),
        (["show", "bfcl:/nowhere"], "pip install --no-deps --target /nowhere bfcl-eval"),
        (["show", "trips", "--task", "-1"], "must be 0 or above"),
        (["show", "trips:x"], "there is no environment 'trips:x'"),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, message):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
