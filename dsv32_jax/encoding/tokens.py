"""Messages as token ids, and which of those a model produced.

Text is tokenised in stretches: all that stands between two turns of the model is one, and each turn
is one. Between them is a special token (the think tag that a prompt ends with, or the end of a
turn), so the ids are those of the whole text, and those that sampling after a prompt gives. Only a
turn that follows a system message or an unanswered call has no token before it; there the ids are
those that sampling gives.

As officially, a message that spells a special token becomes that token, whoever wrote it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, Int32

from dsv32_jax import tokenizer as tokenizers
from dsv32_jax.encoding import markup, messages
from dsv32_jax.encoding.errors import EncodingError
from dsv32_jax.encoding.messages import Format, Message, Span

TURN_ENDS = re.compile(f"({re.escape(markup.BOS)}|{re.escape(markup.EOS)})")


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The ids of the official format's special texts; None for one that is no single token.

    For callers that look for the parts of a turn in ids, such as a mask or a limit on reasoning; the
    encoder itself uses `bos` and `eos` only.

    Attributes:
        bos: begins a text.
        eos: ends a turn of the model.
        user: comes before a user's message.
        assistant: comes after it.
        think_start: opens reasoning.
        think_end: closes it.
        dsml: marks the tags of calls.
    """

    bos: int | None
    eos: int
    user: int | None
    assistant: int | None
    think_start: int | None
    think_end: int | None
    dsml: int | None

    @classmethod
    def from_tokenizer(cls, tokenizer: tokenizers.Tokenizer) -> "SpecialTokens":
        """Look the tokens up by their official texts.

        Args:
            tokenizer: any tokenizer. Where it has no token for the official text that begins a
                text or ends a turn, its own `bos_id` and `eos_id` stand in.

        Returns:
            the ids.
        """
        bos, eos = tokenizer.token_id(markup.BOS), tokenizer.token_id(markup.EOS)
        return cls(
            bos=tokenizer.bos_id if bos is None else bos,
            eos=tokenizer.eos_id if eos is None else eos,
            user=tokenizer.token_id(markup.USER),
            assistant=tokenizer.token_id(markup.ASSISTANT),
            think_start=tokenizer.token_id(markup.THINK_START),
            think_end=tokenizer.token_id(markup.THINK_END),
            dsml=tokenizer.token_id(markup.DSML),
        )


@dataclass(frozen=True)
class TokenizedMessages:
    """Token ids of messages.

    Attributes:
        ids: the tokens.
        trainable: which of them a model produces: reasoning with the tag that closes it, content,
            calls and the end of the turn. The think tag that the prompt ends with is not among
            them.
    """

    ids: Int32[np.ndarray, " T"]
    trainable: Bool[np.ndarray, " T"]


def encode_text(text: str, tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Tokenise text of the official format.

    Args:
        text: such as `encode_messages` writes.
        tokenizer: any tokenizer. Special texts that are no tokens of its own are tokenised as
            text, but for the two that begin a text and end a turn: they become its `bos_id` (or
            nothing, if it has none) and `eos_id`.

    Returns:
        the ids, with nothing added.
    """
    ends = _ends(tokenizer)
    ids: list[int] = []
    for part in TURN_ENDS.split(text) if ends else [text]:
        if part in ends:
            ids += [end for end in [ends[part]] if end is not None]
        elif part:
            ids += tokenizer.encode(part)
    return ids


def decode_text(ids: Sequence[int] | Int[np.ndarray, " S"], tokenizer: tokenizers.Tokenizer) -> str:
    """Return the text of ids, as the parsers read it.

    Args:
        ids: token ids, such as a sampled turn.
        tokenizer: any tokenizer. Where `encode_text` lets its `bos_id` and `eos_id` stand in,
            they become the official texts again.

    Returns:
        the text, special tokens spelled out.
    """
    names = {end: text for text, end in _ends(tokenizer).items() if end is not None}
    parts: list[str] = []
    run: list[int] = []
    for token in map(int, ids):
        if token in names:
            parts += [tokenizer.decode(run), names[token]]
            run = []
        else:
            run.append(token)
    return "".join([*parts, tokenizer.decode(run)])


def encode_to_tokens(
    conversation: Sequence[Message],
    tokenizer: tokenizers.Tokenizer,
    *,
    thinking_mode: str,
    context: Sequence[Message] = (),
    drop_thinking: bool = True,
    add_bos: bool = True,
    tools_block: str | None = None,
    response_format_block: str | None = None,
) -> TokenizedMessages:
    """Write messages in the official format, as tokens.

    Args:
        conversation: the messages, as for `encode_messages`.
        tokenizer: any tokenizer; see `encode_text`.
        thinking_mode: as for `encode_messages`.
        context: as for `encode_messages`.
        drop_thinking: as for `encode_messages`.
        add_bos: as for `encode_messages`.
        tools_block: as for `encode_messages`.
        response_format_block: as for `encode_messages`.

    Returns:
        the ids, and which of them train.

    Raises:
        EncodingError: as for `encode_messages`.
    """
    form = Format(
        thinking_mode=thinking_mode,
        tools_block=tools_block,
        response_format_block=response_format_block,
    )
    spans = messages.spans(
        conversation, form, context=context, drop_thinking=drop_thinking, add_bos=add_bos
    )
    ids: list[int] = []
    trainable: list[bool] = []
    for span in _stretches(spans):
        stretch = encode_text(span.text, tokenizer)
        ids += stretch
        trainable += [span.by_model] * len(stretch)
    return TokenizedMessages(np.array(ids, np.int32), np.array(trainable, np.bool_))


def append_turn(
    new_messages: Sequence[Message],
    tokenizer: tokenizers.Tokenizer,
    *,
    thinking_mode: str,
    sampled_ids: Sequence[int] | Int[np.ndarray, " S"],
    n_calls: int = 0,
    tools_block: str | None = None,
    response_format_block: str | None = None,
) -> Int32[np.ndarray, " N"]:
    """Tokenise what comes between a sampled turn and the model's next one.

    Nothing that was there before is tokenised again: prompt, sampled ids and these ids are the next
    prompt. A sampled turn without the token that ends it (it was cut off, or stopped at its calls)
    gets one here.

    A user's or developer's message takes the reasoning out of the turns before it in thinking mode,
    so there is nothing that could be appended: that is an error, and `encode_to_tokens` of the whole
    conversation makes the new prompt.

    Args:
        new_messages: first the `n_calls` tool messages, in the order of the calls; in chat mode
            system, user and developer messages may follow. The last must be one that the model
            answers.
        tokenizer: the one that made the prompt.
        thinking_mode: as for `encode_messages`.
        sampled_ids: the ids of the sampled turn.
        n_calls: how many results the turn gets: one a call, and one more for each call that could
            not be read and is answered with an error.
        tools_block: as for `encode_messages`.
        response_format_block: as for `encode_messages`.

    Returns:
        the new ids, none of which the model produced.

    Raises:
        EncodingError: the messages can not follow, or have no text in this format.
    """
    form = Format(
        thinking_mode=thinking_mode,
        tools_block=tools_block,
        response_format_block=response_format_block,
    )
    _check_continuation(new_messages, form, n_calls=n_calls)
    text = "".join(_continue(new_messages, form, n_calls=n_calls))
    eos = SpecialTokens.from_tokenizer(tokenizer).eos
    is_open = len(sampled_ids) == 0 or int(sampled_ids[-1]) != eos
    return np.array([eos] * is_open + encode_text(text, tokenizer), np.int32)


def _ends(tokenizer: tokenizers.Tokenizer) -> dict[str, int | None]:
    """Return what stands in for the official texts that begin a text and end a turn.

    Empty where the tokenizer has tokens for both, and so needs no help.
    """
    own = (tokenizer.token_id(markup.BOS), tokenizer.token_id(markup.EOS))
    if None not in own:
        return {}
    special = SpecialTokens.from_tokenizer(tokenizer)
    return {markup.BOS: special.bos, markup.EOS: special.eos}


def _stretches(spans: Sequence[Span]) -> Iterator[Span]:
    """Join what stands between two turns; each turn stays alone, for it ends in a token."""
    prompt: list[str] = []
    for span in spans:
        if not span.by_model:
            prompt.append(span.text)
            continue
        yield Span("".join(prompt), False)
        prompt.clear()
        yield span
    yield Span("".join(prompt), False)


def _check_continuation(new_messages: Sequence[Message], form: Format, *, n_calls: int) -> None:
    roles = [message.get("role") for message in new_messages]
    results = roles.count("tool")
    if results != n_calls or "tool" in roles[n_calls:]:
        raise EncodingError(f"n_calls={n_calls} tool messages must come first, roles are {roles}")
    if any(role in messages.ASKING_ROLES for role in roles) and form.thinking_mode == "thinking":
        raise EncodingError(
            "in thinking mode a user or developer message changes the turns before it:"
            " make the prompt anew with encode_to_tokens"
        )
    if any(role not in ("system", "tool", *messages.ASKING_ROLES) for role in roles):
        raise EncodingError(f"only tool, system, user and developer can follow, roles are {roles}")
    if not roles or roles[-1] == "system":
        raise EncodingError(f"the last message must be one that is answered, roles are {roles}")


def _continue(new_messages: Sequence[Message], form: Format, *, n_calls: int) -> Iterator[str]:
    for i, message in enumerate(new_messages):
        try:
            match message["role"]:
                case "tool":
                    yield messages.render_result(
                        message, form, number=i + 1, of=n_calls, thinks=True
                    )
                case "system":
                    yield messages.render_system(message, form)
                case _:
                    yield messages.render_asking(message, form, thinks=True)
        except EncodingError as error:
            raise EncodingError(f"new message {i} ({message['role']}): {error}") from error
