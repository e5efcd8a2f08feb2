import dataclasses
import io
import json

import pytest

from dsv32_jax import config, encoding
from dsv32_jax.generate import __main__ as command
from dsv32_jax.generate import chat
from dsv32_jax.tokenizer import ByteTokenizer

SHORT = ["--tokenizer", "bytes", "--dtype", "float32", "--max-len", "64", "--prefill-chunk", "32"]


@pytest.fixture
def checkpoint(official, draw):
    """One plain layer over bytes."""
    tiny = config.tiny()
    cfg = dataclasses.replace(tiny, vocab_size=264, n_layers=1, n_dense_layers=1, mtp=False)
    return official(cfg, draw(cfg))[0]


@pytest.fixture
def run(capsys, checkpoint):
    def call(*arguments, expected=0):
        status = command.main([str(checkpoint), *SHORT, *map(str, arguments)])
        said = capsys.readouterr()
        assert status == expected, said.err
        return said

    return call


def test_a_text_is_continued_repeatably_and_the_figures_go_to_stderr(run):
    first, again, other = (
        run("--prompt", "import os", "--max-tokens", 12, "--seed", seed) for seed in (1, 1, 2)
    )
    assert first.out == again.out != other.out
    assert first.out.endswith("\n")
    assert "12 tokens drawn, 10 of prompts run" in first.err


def test_a_mesh_of_one_device_draws_the_same(run):
    plain = run("--prompt", "import os", "--max-tokens", 6).out
    assert run("--prompt", "import os", "--max-tokens", 6, "--mesh", "tensor=1").out == plain


def test_samples_have_seeds_of_their_own_and_equal_those_drawn_alone(run):
    alone = [run("--prompt", "x", "--max-tokens", 6, "--seed", s).out for s in (5, 6)]
    both = run("--prompt", "x", "--max-tokens", 6, "--seed", 5, "--samples", 2).out
    assert both == f"--- seed 5\n{alone[0]}--- seed 6\n{alone[1]}"


def test_the_prompt_is_read_from_standard_input(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("import os"))
    piped = run("--prompt", "-", "--max-tokens", 4).out
    assert piped == run("--prompt", "import os", "--max-tokens", 4).out


def test_messages_are_answered_in_the_official_format(run, tmp_path):
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([{"role": "user", "content": "hello"}]))
    said = run("--messages", path, "--max-tokens", 5)
    # BOS, <User>, the text, <Assistant>, </think>: the official texts are plain bytes to this tokenizer.
    written = "<｜User｜>hello<｜Assistant｜></think>"
    assert f"{1 + len(ByteTokenizer().encode(written))} of prompts run" in said.err
    assert "[not in the format: " in said.out  # noise of a random model does not end its turn


def test_the_end_of_the_message_format_ends_an_answer(tmp_path, run, monkeypatch):
    """A tokenizer may end texts with another token than the format does."""
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([{"role": "user", "content": "hello"}]))
    whole = run("--messages", path, "--max-tokens", 8)
    assert "8 tokens drawn" in whole.err
    drawn = draws_of(run, path)
    special = dataclasses.replace(
        encoding.SpecialTokens.from_tokenizer(ByteTokenizer()), eos=drawn[2]
    )
    monkeypatch.setattr(encoding.SpecialTokens, "from_tokenizer", lambda tokenizer: special)
    ended = run("--messages", path, "--max-tokens", 8)
    assert f"{drawn.index(drawn[2]) + 1} tokens drawn" in ended.err


def draws_of(run, path):
    """The tokens that are drawn for a conversation."""
    drawn, collect = [], chat.Engine.run

    def watched(engine):
        for event in collect(engine):
            drawn.append(getattr(event, "token", None))
            yield event

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chat.Engine, "run", watched)
        run("--messages", path, "--max-tokens", 8)
    return drawn[:-1]


def test_a_conversation_goes_on_line_by_line(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\n/new\n/quit\nnever read\n"))
    said = run("--chat", "--max-tokens", 3)
    assert "3 tokens drawn" in said.err


def test_a_line_that_is_too_long_is_left_out_and_the_conversation_goes_on(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 70 + "\nhi\n"))
    said = run("--chat", "--max-tokens", 3)
    assert "[too long: " in said.out
    assert "3 tokens drawn" in said.err


@pytest.mark.parametrize("arguments", [["--prompt", "-"], ["--chat"]])
def test_input_that_is_no_text_is_one_line(run, monkeypatch, arguments):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    said = run(*arguments, expected=1 if arguments == ["--chat"] else 2)
    assert "standard input is not UTF-8" in said.err
    assert "Traceback" not in said.err


def test_a_conversation_must_end_in_what_a_model_answers(run, tmp_path):
    path = tmp_path / "talk.json"
    for last in ({"role": "assistant", "content": "x"}, {"role": "system", "content": "x"}):
        path.write_text(json.dumps([{"role": "user", "content": "x"}, last]))
        assert "the last message must be of user" in run("--messages", path, expected=2).err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "one of the arguments --prompt --messages --chat is required"),
        (["--prompt", "x", "--max-tokens", 0], "max_tokens=0 must be at least 1"),
        (["--prompt", "x", "--top-p", 2], "top_p=2.0 must be in"),
        (["--prompt", "x", "--system", ""], "--system works with"),
        (["--prompt", "x", "--top-k", 2**31], "top_k=2147483648 must be in"),
        (["--prompt", "x", "--max-len", 10**12], "more than int32 can count"),
        (["--prompt", "x", "--thinking"], "--thinking works with --messages or --chat"),
        (["--messages", "nowhere.json"], "nowhere.json"),
        (["--chat", "--samples", 2], "--samples works with --prompt"),
        (["--prompt", "x", "--speculative"], "speculative=True needs a model with an MTP module"),
        (["--prompt", "x", "--tokenizer", "nowhere"], "tokenizer='nowhere'"),
        (
            ["--prompt", "x", "--mesh", "tensor=3"],
            "(data=1, fsdp=1, expert=1, tensor=3, context=1)",
        ),
        (["--prompt", "x", "--mesh", "heads=1"], "'heads=1' must be AXIS=SIZE"),
        (["--prompt", "x", "--cache-tokens", 10, "--max-len", 65], "fewer than max_len=65"),
        (["--prompt", "x" * 64], "--max-len 64 leaves no room"),
        (["--prompt", "x", "--stop", ""], "--stop ''"),
        (["--prompt", "x", "--samples", 2, "--seed", 2**32 - 1], "seed=4294967296 must be in"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(run, arguments, words):
    said = run(*arguments, expected=2)
    assert words in said.err
    assert "Traceback" not in said.err


def test_a_messages_file_may_hold_tools(tmp_path):
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": [1]}))
    assert chat.read_messages(path) == [
        {"role": "system", "content": "", "tools": [1]},
        {"role": "user", "content": "x"},
    ]


@pytest.mark.parametrize("text", ["{", "[" * 100000, "[]", '{"tools": []}', '["x"]', "3"])
def test_a_messages_file_of_another_form_is_refused(tmp_path, text):
    path = tmp_path / "talk.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"talk\.json"):
        chat.read_messages(path)


@pytest.mark.parametrize("place", ["encoding", "official/encoding"])
@pytest.mark.parametrize("inside", [".", "checkpoints", "checkpoints/3"])
def test_the_tools_block_that_came_with_a_checkpoint_is_read(tmp_path, place, inside, monkeypatch):
    monkeypatch.setattr(encoding, "read_tools_block", str)
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    assert chat.tools_block_of(tmp_path / inside, None) == str(tmp_path / place)
    assert chat.tools_block_of(tmp_path / "elsewhere", None) is None
