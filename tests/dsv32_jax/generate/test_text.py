import pytest

from dsv32_jax.generate.text import TextStream
from dsv32_jax.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def stream(text, stop=()):
    out = TextStream(BYTES, stop)
    pieces = []
    for token in BYTES.encode(text):
        pieces.append(out.push(token))
        if out.stopped:
            break
    return [*pieces, out.finish()], out


@pytest.mark.parametrize("text", ["plain", "größer 漢字 🙂", "", "a\ufffdb", "\ufffd"])
def test_the_pieces_are_the_text_and_each_is_whole_characters(text):
    pieces, _ = stream(text)
    assert "".join(pieces) == text
    for piece in pieces:
        assert piece in text


def test_a_character_cut_off_at_the_end_is_shown_as_such():
    out = TextStream(BYTES)
    assert [out.push(b) for b in "ö".encode()[:1]] == [""]
    assert out.finish() == "\ufffd"


def test_bytes_that_are_no_character_are_not_held_for_ever():
    out = TextStream(BYTES)
    pieces = [out.push(0x80) for _ in range(9)]
    assert "".join(pieces).startswith("\ufffd" * 8)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),
        ("aab", ["ab"], "a"),
        ("xyz", ["yz", "y"], "x"),
        ("abab!", ["abab!"], ""),
        ("ababab!", ["abab!"], "ab"),
        ("no stop EN", ["END", "NDE"], "no stop EN"),
    ],
)
def test_a_text_ends_before_its_first_stop_string(text, stop, expected):
    pieces, out = stream(text, stop)
    assert "".join(pieces) == expected
    assert out.stopped == (expected != text)


def test_nothing_of_a_stop_string_is_ever_shown():
    pieces, _ = stream("go ST OP STOP", ["STOP"])
    shown = ""
    for piece in pieces:
        shown += piece
        assert "go ST OP ".startswith(shown)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop=''"):
        TextStream(BYTES, [""])


class Words(ByteTokenizer):
    """A tokenizer that puts a space between words, so that a word alone has none."""

    def decode(self, ids):
        return " ".join(f"w{i}" for i in ids)


def test_spaces_between_tokens_are_kept():
    out = TextStream(Words())
    assert [out.push(i) for i in range(4)] == ["w0", " w1", " w2", " w3"]
