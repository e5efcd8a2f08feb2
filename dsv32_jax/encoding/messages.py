"""Messages as one text in the official format."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv32_jax.encoding import blocks, markup
from dsv32_jax.encoding.calls import render_calls, render_schemas, to_json
from dsv32_jax.encoding.errors import EncodingError

ROLES = ("system", "user", "developer", "assistant", "tool")
ASKING_ROLES = ("user", "developer")

type Message = Mapping[str, Any]


@dataclass(frozen=True)
class Span:
    """A stretch of the text that is wholly the model's own, or wholly not.

    Attributes:
        text: the stretch.
        by_model: whether an assistant's model writes it: reasoning and what ends it, content,
            calls and the end of the turn.
    """

    text: str
    by_model: bool


@dataclass(frozen=True, kw_only=True)
class Format:
    """How messages are written.

    Attributes:
        thinking_mode: "chat" or "thinking".
        tools_block: the wording around tool schemas, with `{tool_schemas}`; None is our own.
        response_format_block: the wording around a response format, with `{schema}`; None is
            our own.
    """

    thinking_mode: str
    tools_block: str | None = None
    response_format_block: str | None = None

    def __post_init__(self) -> None:
        """Reject an unknown mode."""
        check_thinking_mode(self.thinking_mode)

    def before_answer(self, *, thinks: bool) -> str:
        """Return the tag that opens the model's reasoning, or says that there is none.

        Args:
            thinks: whether the model reasons here in thinking mode.

        Returns:
            `<think>` or `</think>`.
        """
        opens = thinks and self.thinking_mode == "thinking"
        return markup.THINK_START if opens else markup.THINK_END


def encode_messages(
    messages: Sequence[Message],
    *,
    thinking_mode: str,
    context: Sequence[Message] = (),
    drop_thinking: bool = True,
    add_bos: bool = True,
    tools_block: str | None = None,
    response_format_block: str | None = None,
) -> str:
    """Write messages in DeepSeek-V3.2's official format.

    Of earlier turns the reasoning is not written, in either mode: a new user message makes it
    disappear. Within the current turn, after the last user message, every step keeps its own.

    Args:
        messages: OpenAI-style messages, oldest first. `content` is a string or None; a system
            or developer message may have `tools` and `response_format`, an assistant message
            `reasoning_content` and `tool_calls`, whose arguments are JSON strings. Tool messages
            answer the calls before them in order; their ids are not read.
        thinking_mode: "thinking" lets the model reason before it answers; "chat" does not.
        context: the messages before these. They count, but they are not written.
        drop_thinking: as the official encoder has it. It decides only whether a developer
            message before the last user message is an error in thinking mode.
        add_bos: whether the text begins with the BOS token where there is no context.
        tools_block: the wording around tool schemas, in which `{tool_schemas}` stands for them;
            None takes this project's own. `read_tools_block` reads the official one.
        response_format_block: the same for a response format, with `{schema}`.

    Returns:
        the text; tokenise it without adding special tokens.

    Raises:
        EncodingError: an unknown mode or role, or a message that has no text in this format.
    """
    form = Format(
        thinking_mode=thinking_mode,
        tools_block=tools_block,
        response_format_block=response_format_block,
    )
    written = spans(messages, form, context=context, drop_thinking=drop_thinking, add_bos=add_bos)
    return "".join(span.text for span in written)


def spans(
    messages: Sequence[Message],
    form: Format,
    *,
    context: Sequence[Message] = (),
    drop_thinking: bool = True,
    add_bos: bool = True,
) -> list[Span]:
    """Write messages as spans, which joined are the text of `encode_messages`.

    Args:
        messages: as for `encode_messages`.
        form: the mode and the wording.
        context: as for `encode_messages`.
        drop_thinking: as for `encode_messages`.
        add_bos: as for `encode_messages`.

    Returns:
        the spans.

    Raises:
        EncodingError: as for `encode_messages`.
    """
    everything = [*context, *messages]
    for i, message in enumerate(everything):
        if not isinstance(message, Mapping):
            raise EncodingError(f"message {i} must be an object, not {type(message).__name__}")
    asking = [i for i, message in enumerate(everything) if message.get("role") in ASKING_ROLES]
    last_user = asking[-1] if asking else -1
    for i, message in enumerate(everything):
        if message.get("role") not in ROLES:
            raise EncodingError(f"message {i}: role={message.get('role')!r} must be one of {ROLES}")
    if messages and drop_thinking and form.thinking_mode == "thinking":
        _check_developers(everything[:last_user] if asking else [])
    written = [Span(markup.BOS, False)] if add_bos and not context else []
    # The last message that is no tool result: results count from there.
    anchor = -1
    for i, message in enumerate(everything):
        anchor = anchor if message["role"] == "tool" else i
        if i < len(context):
            continue
        try:
            written += _render(everything, i, anchor=anchor, last_user=last_user, form=form)
        except EncodingError as error:
            raise EncodingError(f"message {i} ({message['role']}): {error}") from error
    return written


def check_thinking_mode(thinking_mode: str) -> None:
    """Reject what is no mode.

    Args:
        thinking_mode: should be "chat" or "thinking".

    Raises:
        EncodingError: it is neither.
    """
    if thinking_mode not in markup.THINKING_MODES:
        raise EncodingError(f"thinking_mode={thinking_mode!r} must be one of chat, thinking")


def render_asking(message: Message, form: Format, *, thinks: bool) -> str:
    """Write a user's or a developer's message and what opens the answer to it.

    Args:
        message: its role is "user" or "developer".
        form: the mode and the wording.
        thinks: whether the model reasons in its answer in thinking mode.

    Returns:
        the text.

    Raises:
        EncodingError: a developer message is empty, or a value has the wrong type.
    """
    if message["role"] == "user":
        # The official encoder formats a missing content with str.format.
        inner = _text(message, "content", none="None")
    else:
        content = _text(message, "content")
        if not content:
            raise EncodingError("content must not be empty")
        inner = f"{_attachments(message, form)}\n\n# The user's message is: {content}"
    return f"{markup.USER}{inner}{markup.ASSISTANT}{form.before_answer(thinks=thinks)}"


def render_result(message: Message, form: Format, *, number: int, of: int, thinks: bool) -> str:
    """Write one tool result, with the block's start before the first and its end after the last.

    Args:
        message: its role is "tool".
        form: the mode and the wording.
        number: which result of the turn it is, from 1.
        of: how many results the turn asked for.
        thinks: whether the model reasons afterwards in thinking mode.

    Returns:
        the text.

    Raises:
        EncodingError: the content is no string.
    """
    start = f"\n\n{markup.RESULTS}" if number == 1 else ""
    result = f"\n<result>{_text(message, 'content', none='None')}</result>"
    end = f"\n{markup.RESULTS_END}\n\n{form.before_answer(thinks=thinks)}" if number == of else ""
    return start + result + end


def render_system(message: Message, form: Format) -> str:
    """Write a system message, which has no token of its own.

    Args:
        message: its role is "system".
        form: the mode and the wording.

    Returns:
        the text.

    Raises:
        EncodingError: a value has the wrong type.
    """
    return _text(message, "content") + _attachments(message, form)


def _render(
    everything: Sequence[Message], i: int, *, anchor: int, last_user: int, form: Format
) -> Iterator[Span]:
    message = everything[i]
    match message["role"]:
        case "system":
            yield Span(render_system(message, form), False)
        case "user" | "developer":
            yield Span(render_asking(message, form, thinks=i == last_user), False)
        case "assistant":
            keeps_reasoning = form.thinking_mode == "thinking" and i > last_user
            yield Span(_render_assistant(message, keeps_reasoning=keeps_reasoning), True)
        case "tool":
            calls = _answered_calls(everything, anchor)
            number = i - anchor
            if number > calls:
                raise EncodingError(f"result {number} of a turn with {calls} tool calls")
            thinks = i >= last_user
            yield Span(render_result(message, form, number=number, of=calls, thinks=thinks), False)


def _render_assistant(message: Message, *, keeps_reasoning: bool) -> str:
    reasoning, content = _text(message, "reasoning_content"), _text(message, "content")
    tool_calls = _list(message, "tool_calls")
    if keeps_reasoning and not reasoning and not tool_calls:
        raise EncodingError("in thinking mode it needs reasoning_content or tool_calls")
    thought = f"{reasoning}{markup.THINK_END}" if keeps_reasoning else ""
    calls = f"\n\n{render_calls(tool_calls)}" if tool_calls else ""
    return f"{thought}{content}{calls}{markup.EOS}"


def _answered_calls(everything: Sequence[Message], anchor: int) -> int:
    """Return how many calls the message has that tool results follow."""
    if anchor < 0 or everything[anchor]["role"] != "assistant":
        raise EncodingError("it must follow an assistant message")
    return len(_list(everything[anchor], "tool_calls"))


def _check_developers(dropped_from: Sequence[Message]) -> None:
    """Reject what the official encoder drops before it runs past the end of the shorter list."""
    for i, message in enumerate(dropped_from):
        if message["role"] == "developer":
            raise EncodingError(
                f"message {i} (developer): in thinking mode it must be the last user or developer"
                " message, or drop_thinking=False"
            )


def _attachments(message: Message, form: Format) -> str:
    """Write the tools and the response format of a system or developer message."""
    text = ""
    if tools := _list(message, "tools"):
        block = blocks.OWN_TOOLS_BLOCK if form.tools_block is None else form.tools_block
        text += "\n\n" + blocks.fill(block, blocks.TOOL_SCHEMAS, render_schemas(tools))
    if response_format := message.get("response_format"):
        wanted = form.response_format_block
        block = blocks.OWN_RESPONSE_FORMAT_BLOCK if wanted is None else wanted
        text += "\n\n" + blocks.fill(block, blocks.SCHEMA, to_json(response_format))
    return text


def _list(message: Message, key: str) -> list[Any]:
    value = message.get(key)
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise EncodingError(f"{key} must be a list, not {type(value).__name__}")
    return list(value)


def _text(message: Message, key: str, *, none: str = "") -> str:
    value = message.get(key)
    if value is None:
        return none
    if not isinstance(value, str):
        raise EncodingError(f"{key} must be a string, not {type(value).__name__}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise EncodingError(f"{key} holds half a character (a lone surrogate)")
    return value
