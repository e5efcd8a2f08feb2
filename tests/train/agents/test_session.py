import sys
import time

import pytest

from train.agents import session as sessions
from train.agents.isolation import Limits
from train.agents.session import Session

pytestmark = pytest.mark.usefixtures("_isolated")


@pytest.fixture(scope="module")
def shared():
    """One that the tests which leave it whole share."""
    with Session(Limits(output_bytes=4000)) as made:
        yield made


@pytest.fixture
def own():
    with Session(Limits(memory_mib=256)) as made:
        yield made


def test_variables_stay_from_call_to_call(shared):
    shared.python("x = 20")

    output = shared.python("print('twice'); 2 * x")

    assert (output.status, output.text) == ("ok", "twice\n40\n")


def test_an_error_is_shown_without_colours(shared):
    output = shared.python("1 / 0")

    assert output.status == "error"
    assert "ZeroDivisionError: division by zero" in output.text
    assert "\x1b" not in output.text


def test_bash_shares_the_files(shared):
    shared.python("open('made.txt', 'w').write('by python')")

    output = shared.bash("cat made.txt; echo; echo complaint >&2; exit 3")

    assert output.status == "error"
    assert output.text == "by python\ncomplaint\n[exit code 3]\n"


def test_bash_does_not_wait_for_what_goes_on_behind(shared):
    output = shared.bash("sleep 50 & echo started")

    assert (output.status, output.text) == ("ok", "started\n")
    assert output.seconds < 5


def test_a_shell_that_closes_its_output_is_waited_for(shared):
    output = shared.bash("exec >&- 2>&-; sleep 0.5; touch waited")
    assert (output.status, output.seconds > 0.5) == ("ok", True)
    assert shared.bash("exec >&- 2>&-; sleep 60", timeout_s=0.5).status == "timeout"


def test_nobody_is_asked_for_input(shared):
    assert shared.python("input()", timeout_s=10.0).status == "error"
    assert shared.bash("read x", timeout_s=10.0).status == "error"


def test_long_output_loses_its_middle(shared):
    for output in (
        shared.python("print('a' * 10_000 + 'z')"),
        shared.bash("printf 'a%.0s' $(seq 10000); echo z"),
    ):
        assert output.status == "ok"
        assert output.text.startswith("aaa")
        assert output.text.endswith("az\n")
        assert f"[... {10_002 - 4000} characters left out ...]" in output.text


@pytest.mark.parametrize("endless", ["while True: print('y' * 100)", "yes"])
def test_endless_output_is_ended_early(shared, endless):
    call = shared.bash if endless == "yes" else shared.python
    output = call(endless, timeout_s=60.0)

    assert output.status == "timeout"
    assert "wrote far too much" in output.text
    assert output.seconds < 20
    assert len(output.text) < 5000


def test_a_call_that_takes_too_long_is_interrupted_and_the_session_goes_on(shared):
    shared.python("kept = 7")

    output = shared.python("import time; time.sleep(60)", timeout_s=0.5)

    assert output.status == "timeout"
    assert "ran for 0.5 s and was interrupted" in output.text
    assert output.seconds < 4
    assert shared.python("kept").text == "7\n"


def test_a_shell_that_takes_too_long_is_killed_with_its_tree(own):
    own.python("kept = 7")
    output = own.bash("setsid sleep 4321 & sleep 4321", timeout_s=0.5)

    assert output.status == "timeout"
    assert "ran for 0.5 s and was killed" in output.text
    assert own.bash("grep -l '^sleep$' /proc/[0-9]*/comm; true").text == ""
    assert own.python("kept").text == "7\n"


def test_who_does_not_heed_the_interrupt_loses_the_variables_and_is_told(own):
    own.put("file", b"stays")
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); x = 1\nwhile True: pass"

    output = own.python(deaf, timeout_s=0.5)

    assert output.status == "lost"
    assert "could not be interrupted" in output.text
    assert "NameError" in own.python("x").text
    assert own.get("file") == b"stays"


def test_a_kernel_that_dies_is_replaced_and_said(own):
    output = own.python("import os; os._exit(1)")

    assert output.status == "lost"
    assert "its variables are lost" in output.text
    assert own.python("1 + 1").text == "2\n"


def test_a_memory_bomb_kills_the_sandbox_and_says_so(own):
    output = own.python("x = []\nwhile True: x.append(bytearray(2**20))")

    assert output.status == "dead"
    assert "took more than 256 MiB" in output.text
    assert not own.is_alive
    assert own.python("1").status == "dead"
    with pytest.raises(OSError, match="killed"):
        own.get("file")


def test_a_fork_bomb_ends_with_the_call(own):
    own.python("kept = 7")
    output = own.bash("f() { f | f & }; f; sleep 100", timeout_s=1.0)

    assert output.status == "timeout"
    assert own.python("kept").text == "7\n"
    assert int(own.bash("ls -d /proc/[0-9]* | wc -l").text) < 10


def test_files_go_in_and_out(shared):
    data = bytes(range(256)) * 5000
    shared.put("some/where/data.bin", data)

    assert shared.get("some/where/data.bin") == data
    assert shared.python("len(open('some/where/data.bin', 'rb').read())").text == "1280000\n"


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a\0b"])
def test_paths_that_lead_out_are_refused(shared, path):
    for action in (lambda: shared.get(path), lambda: shared.put(path, b"")):
        with pytest.raises(ValueError, match="must be a path inside the working folder"):
            action()


def test_links_do_not_lead_out_of_the_sandbox(shared, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    shared.bash(f"ln -sf {secret} read; ln -sf {tmp_path} folder; ln -sf /etc/passwd users")

    for path in ("read", "folder/secret", "users"):
        with pytest.raises(OSError, match="No such file"):
            shared.get(path)
    with pytest.raises(OSError, match=r"File exists|No such file"):
        shared.put("folder/made", b"x")
    assert secret.read_text() == "of the host"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("mkfifo f", "is no file"),
        ("mkdir f", "directory"),
        ("ln -s /dev/zero f", "is no file"),
        ("truncate -s 100M f", "more than 1000 bytes"),
        ("touch f; chmod 0 f", "Permission denied"),
    ],
)
def test_what_is_no_file_of_the_right_size_is_not_read(shared, make, message):
    shared.bash(f"rm -rf f; {make}")

    started = time.monotonic()
    with pytest.raises(OSError, match=message):
        shared.get("f", max_bytes=1000)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("number", "message"), [("SIGKILL", "the sandbox died"), ("SIGSTOP", "does not answer")]
)
def test_who_attacks_the_driver_ends_its_own_sandbox(own, monkeypatch, number, message):
    monkeypatch.setattr(sessions, "SLACK_S", 1.0)
    output = own.python(f"import os, signal; os.kill(os.getppid(), signal.{number})", timeout_s=2.0)

    assert output.status == "dead"
    assert message in output.text
    assert not own.is_alive


@pytest.fixture
def forging(tmp_path, monkeypatch):
    """Return a function that makes a session with a driver which writes an expression's value for an answer."""
    made = []

    def make(expression):
        path = tmp_path / "driver.py"
        good = '{"status": "ok", "text": "", "note": ""}'
        source = f"import sys\nprint('{good}', flush=True)\ninput()\nwhile True:\n"
        path.write_text(source + f"  sys.stdout.buffer.write({expression})\n  sys.stdout.flush()\n")
        monkeypatch.setattr(sessions.driver, "__file__", str(path))
        made.append(Session())
        return made[-1]

    yield make
    for session in made:
        session.close()


@pytest.mark.parametrize(
    "answer",
    [
        "b'no json\\n'",
        "b'[' * 60_000 + b'\\n'",
        "b'[1]\\n'",
        """b'{"status":"sudo","text":"","note":""}\\n'""",
        """b'{"status":["ok"],"text":"","note":""}\\n'""",
        """b'{"status":"ok","text":1,"note":""}\\n'""",
        """b'{"status":"ok","text":""}\\n'""",
        "b'\\xff' * 100 + b'\\n'",
        "b'9' * 10_000 + b'\\n'",
        "b'endless'",
    ],
)
def test_a_forged_answer_out_of_form_ends_the_sandbox(forging, answer):
    session = forging(answer)

    output = session.python("1")

    assert output.status == "dead"
    assert "out of form" in output.text
    assert not session.is_alive


def test_a_forged_answer_is_only_text(forging):
    session = forging(r"""b'{"status":"ok","text":"\ud800 forged","note":""}\n'""")

    assert session.python("1").text == "? forged"


def test_a_forged_file_is_no_larger_than_asked(forging):
    session = forging(r"""b'{"status":"ok","text":"","note":"' + b'A' * 4096 + b'"}\n'""")

    with pytest.raises(OSError, match="more than 1000 bytes"):
        session.get("x", max_bytes=1000)


def test_a_request_that_nobody_reads_does_not_hang(own, monkeypatch):
    monkeypatch.setattr(sessions, "SLACK_S", 1.0)
    own.bash("(sleep 1; kill -STOP $PPID) &")
    time.sleep(2)

    with pytest.raises(OSError, match="does not answer"):
        own.put("large", bytes(2**22))


def test_a_closed_session_says_so(own):
    own.close()
    own.close()

    assert not own.is_alive
    assert "closed" in own.python("1").text


def test_without_a_library_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    with pytest.raises(
        Exception, match=r"a session needs ipykernel: pip install 'dsv32-jax\[agents\]'"
    ):
        Session()


def test_unsafe_local_does_the_same_without_isolation(tmp_path):
    with Session(unsafe_local=True) as session:
        session.python(f"open({str(tmp_path / 'out')!r}, 'w').write('reached')")
        session.put("file", b"bytes")

        assert session.get("file") == b"bytes"
        assert session.bash("cat file").text == "bytes"
        assert session.bash("sleep 60", timeout_s=0.5).status == "timeout"

    assert (tmp_path / "out").read_text() == "reached"
