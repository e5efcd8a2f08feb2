"""Conversations at the terminal: messages in, thinking, answers and tool calls out as they are drawn."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dsv32_jax import encoding, load_model
from dsv32_jax.convert.storage import Location
from dsv32_jax.encoding import markup
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import TokenEvent
from dsv32_jax.generate.sampling import SamplingParams
from dsv32_jax.generate.text import TextStream
from dsv32_jax.tokenizer import Tokenizer

ANSWERED = ("user", "developer", "tool")  # who says what a model answers
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass
class Conversation:
    """Messages and how they are written.

    Attributes:
        messages: So far, in the OpenAI form; answers are added.
        tokenizer: Of the model.
        thinking_mode: "thinking" or "chat".
        tools_block: Text that describes tools to the model; None is this project's own wording.
        response_format_block: Text that describes a response's format; None is this project's own wording.
        stop: Strings that end an answer.
    """

    messages: list[dict[str, Any]]
    tokenizer: Tokenizer
    thinking_mode: str
    tools_block: str | None = None
    response_format_block: str | None = None
    stop: tuple[str, ...] = ()

    def encode(self) -> list[int]:
        """Return the tokens that the model goes on from.

        Raises:
            EncodingError: If the messages have no text in the official format.
        """
        encoded = encoding.encode_to_tokens(
            self.messages,
            self.tokenizer,
            thinking_mode=self.thinking_mode,
            tools_block=self.tools_block,
            response_format_block=self.response_format_block,
        )
        return encoded.ids.tolist()


def read_messages(path: Location) -> list[dict[str, Any]]:
    """Read a conversation.

    Args:
        path: JSON: a list of messages, or an object with `messages` and maybe `tools`, which then belong to the first
            system message.

    Returns:
        The messages.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not JSON of that form.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    whole = raw if isinstance(raw, dict) else {"messages": raw}
    messages: Any = whole.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) for m in messages)
    ):
        raise ValueError(f"{path} must hold a list of messages, or an object with messages")
    if whole.get("tools") is None:
        return messages
    if messages[0].get("role") not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": ""})
    return [messages[0] | {"tools": whole["tools"]}, *messages[1:]]


def tools_block_of(checkpoint: Location, override: Location | None) -> str | None:
    """Return the text that describes tools to a checkpoint's model.

    Args:
        checkpoint: As for `load_model`; the `encoding/` that came with it is read if it is there.
        override: A file or folder to read instead.

    Returns:
        The block; None for this project's own wording.

    Raises:
        FileNotFoundError: If `override` does not exist.
        EncodingError: If what is read is not the official block.
    """
    if override is not None:
        return encoding.read_tools_block(override)
    folder = _encoding_folder(checkpoint)
    return None if folder is None else encoding.read_tools_block(folder)


def response_format_block_of(checkpoint: Location) -> str | None:
    """Return the text that describes a response's format to a checkpoint's model.

    Args:
        checkpoint: As for `load_model`; the `encoding/` that came with it is read if it is there.

    Returns:
        The block; None for this project's own wording.

    Raises:
        EncodingError: If there is no such block in the folder.
    """
    folder = _encoding_folder(checkpoint)
    return None if folder is None else encoding.read_response_format_block(folder)


def _encoding_folder(checkpoint: Location) -> Location | None:
    folders = (folder / "encoding" for folder in load_model.folders_beside(checkpoint))
    return next((folder for folder in folders if folder.is_dir()), None)


def draw_answer(
    engine: Engine, talk: Conversation, params: SamplingParams
) -> Iterator[encoding.Event]:
    """Answer the last message and add the answer to the conversation.

    Args:
        engine: Idle.
        talk: Ends in a message that the model answers.
        params: How tokens are drawn.

    Yields:
        What the model says, as it says it.

    Raises:
        EncodingError: If the messages have no text in the official format.
    """
    # A tokenizer may end texts with another token than the message format does.
    end = encoding.SpecialTokens.from_tokenizer(talk.tokenizer).eos
    ends = {end, talk.tokenizer.eos_id}
    stream = TextStream(talk.tokenizer, talk.stop)
    parser = encoding.StreamingParser(talk.thinking_mode)
    request = engine.submit(talk.encode(), replace(params, stop_ids=(end,)))
    for event in engine.run():
        if not isinstance(event, TokenEvent) or stream.stopped:
            continue
        if event.token in ends:
            yield from parser.feed(stream.finish() + markup.EOS)
            continue
        yield from parser.feed(stream.push(event.token))
        if stream.stopped:
            engine.cancel(request)
    yield from parser.feed(stream.finish())
    yield from parser.finish()
    talk.messages.append(parser.message())


def answer(engine: Engine, talk: Conversation, params: SamplingParams) -> None:
    """Answer a conversation once and print it.

    Args:
        engine: Idle.
        talk: The conversation.
        params: How tokens are drawn.
    """
    _show(draw_answer(engine, talk, params))


def converse(engine: Engine, talk: Conversation, params: SamplingParams) -> None:
    """Read lines and answer them until the input ends or the person types /quit; /new forgets the conversation.

    Args:
        engine: Idle.
        talk: How to begin.
        params: How tokens are drawn.
    """
    begin = list(talk.messages)
    while True:
        line = _ask()
        if line is None or line.strip() == "/quit":
            return
        if line.strip() == "/new":
            talk.messages = list(begin)
        elif line.strip():
            talk.messages.append({"role": "user", "content": line})
            n_tokens = len(talk.encode())
            if n_tokens >= engine.cfg.max_len:
                talk.messages.pop()
                _write(f"[too long: {n_tokens} tokens of {engine.cfg.max_len}; /new begins anew]\n")
                continue
            _show(draw_answer(engine, talk, params))


def _ask() -> str | None:
    if sys.stdin.isatty():
        sys.stdout.write("> ")
        sys.stdout.flush()
    line = read_input(whole=False)
    return line.removesuffix("\n") if line else None


def read_input(*, whole: bool = True) -> str:
    """Read standard input.

    Args:
        whole: All of it, or the next line.

    Returns:
        The text.

    Raises:
        ValueError: If it is not UTF-8.
    """
    try:
        return sys.stdin.read() if whole else sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from error


def _show(events: Iterator[encoding.Event]) -> None:
    """Print an answer as it comes: the thinking dimmed, calls as function(arguments), problems last."""
    problems: list[str] = []
    shown: type | None = None
    for event in events:
        match event:
            case encoding.ReasoningDelta(text=text):
                _write(_dimmed(text if shown else f"[thinking] {text}"))
            case encoding.ContentDelta(text=text):
                _write(f"\n[answer] {text}" if shown is encoding.ReasoningDelta else text)
            case encoding.CallStart(name=name):
                _write(f"\n[call] {name}(")
            case encoding.ArgumentsDelta(text=text):
                _write(text)
            case encoding.CallEnd():
                _write(")")
            case encoding.Problem(message=message):
                problems.append(message)
        shown = type(event)
    _write("\n" + "".join(f"[not in the format: {problem}]\n" for problem in problems))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _dimmed(text: str) -> str:
    return f"{DIM}{text}{PLAIN}" if sys.stdout.isatty() else text
