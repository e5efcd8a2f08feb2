import pytest

from train.agents import isolation, sandbox


@pytest.mark.usefixtures("_isolated")
def test_check_says_that_it_works(capsys):
    assert sandbox.main(["check"]) == 0
    assert capsys.readouterr().out == "code of a model can be isolated here\n"


@pytest.mark.usefixtures("_isolated")
def test_a_line_and_a_file_are_run(capsys, tmp_path):
    (tmp_path / "script.py").write_text("print('\\x1b[31mred')\n1/0\n")

    assert sandbox.main(["bash", "echo $USER"]) == 0
    assert capsys.readouterr().out == "sandbox\n"
    assert sandbox.main(["python", str(tmp_path / "script.py"), "--memory-mib", "512"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("\\x1b[31mred\n")
    assert "ZeroDivisionError" in out
    assert err.startswith("error after")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bash"], "bash takes a text behind it"),
        (["check", "x"], "check takes nothing behind it"),
        (["check", "--disk-mib", "0"], "disk_mib=0 must be at least 1"),
        (["perl", "x"], "invalid choice"),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, message):
    assert sandbox.main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_without_isolation_it_refuses(capsys, monkeypatch):
    monkeypatch.setattr(isolation, "find_problem", lambda: "bwrap not found")

    assert sandbox.main(["bash", "true"]) == 2
    assert "can not be isolated here: bwrap not found" in capsys.readouterr().err
