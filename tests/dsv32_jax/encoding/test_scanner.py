import pytest

from dsv32_jax.encoding.scanner import Scanner, Stops

STOPS = Stops("<end>", "\n\n<x", "en")


def scan(pieces, stops=STOPS):
    scanner, found, text = Scanner(), [], ""
    for i in range(len(pieces) + 1):
        final = i == len(pieces)
        scanner.feed("" if final else pieces[i])
        while True:
            before, stop = scanner.advance(stops, final=final)
            text += before
            if stop is None:
                break
            found.append((text, stop, scanner.position))
            text = ""
    return found, text


def test_the_leftmost_string_is_found_though_another_ends_earlier():
    assert scan(["a<end>b"]) == ([("a", "<end>", 6)], "b")
    assert scan(["a<enx"]) == ([("a<", "en", 4)], "x")


def test_of_a_repeated_beginning_the_last_one_counts():
    assert scan(["\n\n\n<x"]) == ([("\n", "\n\n<x", 5)], "")


@pytest.mark.parametrize("text", ["a<end>b\n\n<x<en", "\n\n\n<x\n\n<", "<<<end>>", ""])
def test_every_cut_finds_the_same(text):
    whole = scan([text])
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            assert scan([text[:i], text[i:j], text[j:]]) == whole
    assert scan(list(text)) == whole


@pytest.mark.parametrize(
    ("text", "certain"), [("ab\n", "ab"), ("ab\n\n<", "ab"), ("ab<x", "ab<x"), ("<<e", "<")]
)
def test_only_the_shortest_tail_that_may_become_a_string_is_held_back(text, certain):
    scanner = Scanner()
    scanner.feed(text)
    assert scanner.advance(STOPS, final=False) == (certain, None)
    assert scanner.advance(STOPS, final=True) == (text[len(certain) :], None)


def test_without_strings_nothing_is_found_and_nothing_held():
    assert scan(["<end>"], Stops()) == ([], "<end>")
