"""What a response says: its thinking, and the final answer, in the format that a run asks for."""

from typing import Literal, NamedTuple

from dsv32_jax.encoding import markup, parse_completion_tolerant

Style = Literal["thinking", "chat", "tags", "lines", "plain"]
THINKING_STYLES: tuple[Style, ...] = ("thinking", "tags", "lines")
OPEN, CLOSE = "<answer>", "</answer>"
BOXED = "\\boxed{"


class Answer(NamedTuple):
    """A response taken apart.

    Attributes:
        thinking: What comes before the answer; "" where there is none.
        final: What verifiers see, without space around it; None where no answer can be told.
        well_formed: Whether the response is in the format, from the first character to the last.
    """

    thinking: str
    final: str | None
    well_formed: bool


def read(text: str, style: Style, *, cut: bool) -> Answer:
    r"""Take a response apart.

    "thinking" and "chat" are the official format: reasoning up to `</think>` (chat has none), content, the token that
    ends the turn; control tokens elsewhere and calls of tools are faults. "tags" is free text, then one
    `<answer>...</answer>` and nothing after it, for policies too small for more; "lines" is for still smaller ones: the
    last line is the answer, those before it are thinking. In "plain" all is answer.

    In the first three the final answer is what stands in `<answer>` tags or in `\boxed{}`, where the content has them.
    Two answers that differ are no answer, so that naming several does not pay.

    Args:
        text: What was drawn, special tokens spelled out.
        style: The format.
        cut: Whether the response ended at the limit of tokens: it then has no answer and no format.

    Returns:
        The parts.
    """
    if style in ("thinking", "chat"):
        message, problems = parse_completion_tolerant(text, thinking_mode=style)
        thinking, content = message["reasoning_content"], message["content"].strip()
        final, one = _final(content)
        well_formed = not problems and not message["tool_calls"] and one and bool(final)
    else:
        text = text.removesuffix(markup.EOS)
        thinking, final, one = "", text.strip(), True  # as "plain" has it
        if style == "tags":
            thinking = text.partition(OPEN)[0].strip()
            final, one = _tagged(text)
        elif style == "lines":
            before, _, final = text.strip().rpartition("\n")
            thinking, final = before.strip(), final.strip()
        well_formed = one and bool(final) and not any(word in text for word in markup.CONTROL)
    if cut:
        return Answer(thinking, None, False)
    return Answer(thinking, final or None, well_formed)


def _final(content: str) -> tuple[str | None, bool]:
    """Return the answer in content, and whether it is said in one way."""
    if OPEN in content or CLOSE in content:
        return _tagged(content)
    boxes = set(_boxed(content))
    if boxes:
        return (boxes.pop(), True) if len(boxes) == 1 else (None, False)
    return content, BOXED not in content


def _tagged(text: str) -> tuple[str | None, bool]:
    """Return what the only pair of tags holds, and whether it ends the text."""
    if text.count(OPEN) != 1 or text.count(CLOSE) != 1 or text.index(CLOSE) < text.index(OPEN):
        return None, False
    inside, _, after = text.partition(OPEN)[2].partition(CLOSE)
    return inside.strip(), not after.strip()


def _boxed(text: str) -> list[str]:
    r"""Return what each innermost `\boxed{}` holds; one that is not closed holds nothing."""
    found = []
    _, *rests = text.split(BOXED)
    for rest in rests:
        depth = 1
        for end, character in enumerate(rest):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                found.append(rest[:end].strip())
                break
    return found
