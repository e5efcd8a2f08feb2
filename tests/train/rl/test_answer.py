import pytest

from dsv32_jax.encoding import markup
from train.rl import answer
from train.rl.answer import Answer

END = markup.EOS


@pytest.mark.parametrize(
    ("text", "style", "expected"),
    [
        (f"2+2.</think>It is 4.{END}", "thinking", Answer("2+2.", "It is 4.", True)),
        (f"2+2.</think>So \\boxed{{4}}.{END}", "thinking", Answer("2+2.", "4", True)),
        (f"a</think><answer> 4 </answer>{END}", "thinking", Answer("a", "4", True)),
        (f"It is 4.{END}", "chat", Answer("", "It is 4.", True)),
        (f"2+2 <answer>4</answer>\n{END}", "tags", Answer("2+2", "4", True)),
        ("2+2 <answer>4</answer>", "tags", Answer("2+2", "4", True)),
        (f" 4\n{END}", "plain", Answer("", "4", True)),
        (f"4{END}", "lines", Answer("", "4", True)),
        (f"2+1=3 \n3+1=4\n4{END}", "lines", Answer("2+1=3 \n3+1=4", "4", True)),
        (f"2+2=4\n 4 \n{END}", "lines", Answer("2+2=4", "4", True)),
        (f"\\boxed{{\\frac{{1}}{{2}}}} is \\boxed{{\\frac{{1}}{{2}}}}{END}", "chat", Answer("", r"\frac{1}{2}", True)),
    ],
)  # fmt: skip
def test_a_response_in_the_format_is_taken_apart(text, style, expected):
    assert answer.read(text, style, cut=False) == expected


@pytest.mark.parametrize(
    ("text", "style", "final"),
    [
        (f"never ends{END}", "thinking", None),
        ("a</think>4", "thinking", "4"),  # no end of the turn
        (f"a</think>4</think>5{END}", "thinking", "45"),
        (f"a</think>{END}", "thinking", None),
        (f"\\boxed{{4}} or \\boxed{{5}}{END}", "chat", None),
        (f"\\boxed{{4{END}", "chat", "\\boxed{4"),
        ("<answer>4</answer><answer>5</answer>", "tags", None),
        ("<answer>3<answer>4</answer>", "tags", None),
        ("<answer>4</answer>5</answer>", "tags", None),
        ("<answer>4</answer> or 5", "tags", "4"),
        ("</answer>4<answer>", "tags", None),
        ("<answer>4", "tags", None),
        ("4", "tags", None),
        ("<answer> </answer>", "tags", None),
        ("<think><answer>4</answer>", "tags", "4"),
        ("", "plain", None),
        ("\n", "lines", None),
        ("<think>\n4", "lines", "4"),
        ("", "thinking", None),
    ],
)
def test_a_response_out_of_the_format_is_not_well_formed(text, style, final):
    found = answer.read(text, style, cut=False)

    assert (found.final, found.well_formed) == (final, False)


@pytest.mark.parametrize("style", ["thinking", "chat", "tags", "lines", "plain"])
def test_a_cut_response_has_no_answer(style):
    found = answer.read(f"a</think><answer>4</answer>{END}", style, cut=True)

    assert (found.final, found.well_formed) == (None, False)


def test_many_open_boxes_take_no_time():
    text = "\\boxed{" * 20_000 + END

    assert not answer.read(text, "chat", cut=False).well_formed
