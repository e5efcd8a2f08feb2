"""How a conversation with tools is written as tokens, and what a policy wrote is read: two forms, one interface."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from dsv32_jax import encoding
from dsv32_jax.encoding import Message, SpecialTokens, TokenizedMessages, markup
from dsv32_jax.tokenizer import Tokenizer
from train.agents.tools import Tool

UNREADABLE = "unreadable_call"  # stands in the history for a call that could not be read
# Of the official format: what is wrong beside a call leaves the calls and the answer as they are.
NOT_OF_CALLS = frozenset(
    {"control_text", "missing_think_end", "missing_end", "text_after_end", "text_after_calls"}
)
QUOTED = ('"', "[", "{")
KEY = re.compile(r"(\w+)=")


class Turn(NamedTuple):
    """What a policy said in one turn.

    Attributes:
        message: The assistant message: role, content, reasoning_content, and tool_calls whose arguments are JSON text.
        problems: Why calls could not be read, each a line that the policy is answered with.
    """

    message: dict[str, Any]
    problems: tuple[str, ...]


@runtime_checkable  # so that the tests' type checks can look at it
class Form(Protocol):
    """A way to write conversations. Reasoning is written only after the last user message."""

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenizedMessages:
        """Write a conversation; one that ends with a user's message or with results is a prompt.

        Args:
            messages: From the first on; the tools are none of them.
            tools: That the policy is told of.

        Returns:
            Its ids, and which of them a policy writes.
        """
        ...

    def results(self, results: Sequence[str], sampled: Sequence[int]) -> list[int]:
        """Write what comes after a turn with calls, before the next turn; nothing earlier is written anew.

        Args:
            results: Of the calls in order, and of those that could not be read.
            sampled: The turn.

        Returns:
            The ids.
        """
        ...

    def read(self, sampled: Sequence[int], tools: Sequence[Tool]) -> Turn:
        """Read a turn, whatever it holds.

        Args:
            sampled: Its ids.
            tools: That may be called.

        Returns:
            What it says.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class OfficialForm:
    """DeepSeek-V3.2's format: think tags, DSML calls, results; see `dsv32_jax.encoding`.

    Attributes:
        tokenizer: Of the policy.
        thinking_mode: "thinking" or "chat".
        tools_block: The wording around schemas; None is this project's own.
    """

    tokenizer: Tokenizer
    thinking_mode: str = "thinking"
    tools_block: str | None = None

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenizedMessages:
        """Write a conversation, see `Form`."""
        return encoding.encode_to_tokens(
            with_tools(messages, tools), self.tokenizer,
            thinking_mode=self.thinking_mode, tools_block=self.tools_block,
        )  # fmt: skip

    def results(self, results: Sequence[str], sampled: Sequence[int]) -> list[int]:
        """Write results, see `Form`."""
        added = encoding.append_turn(
            [{"role": "tool", "content": text} for text in results], self.tokenizer,
            thinking_mode=self.thinking_mode, sampled_ids=list(sampled), n_calls=len(results),
        )  # fmt: skip
        return [int(token) for token in added]

    def read(self, sampled: Sequence[int], tools: Sequence[Tool]) -> Turn:
        """Read a turn, see `Form`."""
        del tools  # the calls name their arguments
        text = encoding.decode_text(sampled, self.tokenizer)
        message, problems = encoding.parse_completion_tolerant(
            text, thinking_mode=self.thinking_mode
        )
        wrong = [problem.message for problem in problems if problem.kind not in NOT_OF_CALLS]
        return Turn(message, tuple(wrong))


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Put tools into the system message, where the official format has them.

    Args:
        messages: The conversation, with or without a system message.
        tools: The tools.

    Returns:
        The conversation.
    """
    if not tools:
        return list(messages)
    first: Message = {"role": "system", "content": ""}
    rest = list(messages)
    if rest and rest[0]["role"] == "system":
        first, *rest = rest
    return [{**first, "tools": [tool.schema for tool in tools]}, *rest]


@dataclass(frozen=True, kw_only=True)
class CompactForm:
    r"""One short line for each thing, for models that know bytes and contexts of hundreds of tokens.

    The first character of a line says what it is; a turn ends with the token that ends a text:

        @price item            a tool: its name, its arguments; `?` behind those that may be left out
        ?What is a pear?       the user
        #look it up            reasoning
        !price pear            a call; several lines are several calls
        =3                     a result, in the order of the calls; line breaks are written \n
        >3                     the answer, which goes on to the end of the turn

    Arguments stand in the schema's order or as `name=value`, with a space between them: words, or JSON where a word
    would not do. The one text of a tool that takes nothing else stands as it is, to the end of the line.

    Attributes:
        tokenizer: Of the policy.
        describe: Put a tool's description behind its line.
    """

    tokenizer: Tokenizer
    describe: bool = False

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenizedMessages:
        """Write a conversation, see `Form`."""
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        last_user = users[-1] if users else -1
        known = {tool.name: tool for tool in tools}
        n_system = int(bool(messages) and messages[0]["role"] == "system")
        parts = [
            (_line(message, known, reasons=i > last_user), message["role"] == "assistant")
            for i, message in enumerate(messages)
        ]
        # The tools stand after the system's words, before all else.
        parts.insert(n_system, ("".join(map(self._tool_line, tools)), False))
        ids: list[int] = []
        trainable: list[bool] = []
        for text, by_model in [(markup.BOS, False), *parts]:
            part = encoding.encode_text(text, self.tokenizer)
            ids += part
            trainable += [by_model] * len(part)
        return TokenizedMessages(np.array(ids, np.int32), np.array(trainable, np.bool_))

    def results(self, results: Sequence[str], sampled: Sequence[int]) -> list[int]:
        """Write results, see `Form`."""
        eos = SpecialTokens.from_tokenizer(self.tokenizer).eos
        text = "".join(_result_line(result) for result in results)
        is_open = not sampled or sampled[-1] != eos
        return [eos] * is_open + encoding.encode_text(text, self.tokenizer)

    def read(self, sampled: Sequence[int], tools: Sequence[Tool]) -> Turn:
        """Read a turn, see `Form`."""
        text = encoding.decode_text(sampled, self.tokenizer).removesuffix(markup.EOS)
        known = {tool.name: tool for tool in tools}
        before, mark, answer = ("\n" + text).partition("\n>")
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        problems: list[str] = []
        for line in before.split("\n"):
            if line.startswith("#"):
                reasoning.append(line[1:])
            elif line.startswith("!"):
                try:
                    calls.append(_read_call(line[1:], known))
                except ValueError as error:
                    problems.append(str(error))
            elif line:
                problems.append(f"{line[:40]!r} begins with none of # ! >")
        if not (mark or calls or problems):
            problems.append("there is neither a call nor an answer")
        message = {
            "role": "assistant",
            "content": answer,
            "reasoning_content": "\n".join(reasoning),
            "tool_calls": calls,
        }
        return Turn(message, tuple(problems))

    def _tool_line(self, tool: Tool) -> str:
        required = tool.parameters.get("required", ())
        names = [
            name if name in required else f"{name}?"
            for name in tool.parameters.get("properties", {})
        ]
        about = f" - {' '.join(tool.description.split())}" if self.describe else ""
        return f"@{' '.join([tool.name, *names])}{about}\n"


def _line(message: Message, tools: Mapping[str, Tool], *, reasons: bool) -> str:
    """Write a message of the compact form."""
    content = message.get("content") or ""
    match message["role"]:
        case "system":
            return f"{content}\n" if content else ""
        case "user":
            return f"?{content}\n"
        case "tool":
            return _result_line(content)
    reasoning = (message.get("reasoning_content") or "") if reasons else ""
    lines = [f"#{line}" for line in reasoning.split("\n")] if reasoning else []
    calls = message.get("tool_calls") or ()
    lines += [_write_call(call["function"], tools) for call in calls]
    if content or not calls:
        lines.append(f">{content}")
    return "\n".join(lines) + markup.EOS


def _result_line(text: str) -> str:
    escaped = text.replace("\n", "\\n")
    return f"={escaped}\n"


def _write_call(function: Mapping[str, str], tools: Mapping[str, Tool]) -> str:
    arguments = json.loads(function["arguments"])
    tool = tools.get(function["name"])
    names = list(tool.parameters.get("properties", {})) if tool else []
    if tool and _takes_one_text(tool) and list(arguments) == names:
        return f"!{function['name']} {_raw_or_json(arguments[names[0]])}"
    words, in_order = [function["name"]], True
    for name in [*(n for n in names if n in arguments), *(a for a in arguments if a not in names)]:
        in_order = in_order and names[len(words) - 1 : len(words)] == [name]
        schema = tool.parameters["properties"].get(name, {}) if tool else {}
        value = _write_value(arguments[name], schema, names)
        words.append(value if in_order else f"{name}={value}")
    return "!" + " ".join(words)


def _takes_one_text(tool: Tool) -> bool:
    schemas = list(tool.parameters.get("properties", {}).values())
    return len(schemas) == 1 and schemas[0].get("type") == "string"


def _raw_or_json(text: str) -> str:
    return json.dumps(text) if "\n" in text or text.startswith('"') or not text else text


def _write_value(value: Any, schema: Mapping[str, Any], names: Sequence[str]) -> str:
    """Write a value as a word where that is read as the same value, else as JSON without spaces between words."""
    if isinstance(value, str):
        key = KEY.match(value)
        plain = value and not value.startswith(QUOTED) and not re.search(r"\s", value)
        if plain and not (key and key[1] in names) and _typed(value, schema) == value:
            return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _read_call(text: str, tools: Mapping[str, Tool]) -> dict[str, Any]:
    """Read a call's line, without its mark; one of an unknown tool keeps its words, which nobody reads."""
    name, _, rest = text.partition(" ")
    tool = tools.get(name)
    if tool is None:
        arguments: dict[str, Any] = {"": rest} if rest else {}
    elif _takes_one_text(tool) and rest and not rest.startswith('"'):
        (only,) = tool.parameters["properties"]
        arguments = {only: rest}
    else:
        arguments = _read_arguments(rest, tool)
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"type": "function", "function": function}


def _read_arguments(text: str, tool: Tool) -> dict[str, Any]:
    properties = tool.parameters.get("properties", {})
    left = list(properties)
    found: dict[str, Any] = {}
    text = text.strip()
    while text:
        key = KEY.match(text)
        if key and key[1] in properties:
            name, text = key[1], text[key.end() :]
        elif left:
            name = left[0]
        else:
            raise ValueError(f"{tool.name}: {text[:40]!r} is one argument too many")
        if name not in left:
            raise ValueError(f"{tool.name}: {name} is given twice")
        left.remove(name)
        if text.startswith(QUOTED):
            try:
                found[name], end = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{tool.name}: {name} is no JSON: {text[:40]!r}") from error
            text = text[end:].lstrip()
        else:
            word, _, text = text.partition(" ")
            found[name], text = _typed(word, properties[name]), text.lstrip()
    return found


def _typed(word: str, schema: Mapping[str, Any]) -> Any:
    """Return the JSON value of a word, or the word itself where text is wanted or it is none."""
    if schema.get("type") == "string":
        return word
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word
