"""Read examples to be imitated: tokens, and which of them are trained.

A line of JSON is one example, in one of three forms:

- `{"prompt": TEXT, "response": TEXT}`: the response trains. Special tokens are spelled out.
- `{"messages": [...], "thinking_mode": "chat"}`: a conversation, which `encoding` writes; the model's turns train.
  `tools_block` may give the wording around tools.
- `{"tokens": [...], "trained": [...]}`: ids, and 0 or 1 for each.

Other fields are kept for people and not read.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from dsv32_jax import encoding
from dsv32_jax.tokenizer import Tokenizer
from train.data import config, files, readers

FORMS = (("prompt", "response"), ("messages",), ("tokens", "trained"))


class Example(NamedTuple):
    """A document of which some tokens train.

    Attributes:
        name: `file:line`, for messages.
        tokens: its ids.
        trained: which of them are predicted in training.
    """

    name: str
    tokens: Int32[np.ndarray, " T"]
    trained: Bool[np.ndarray, " T"]


def read_examples(source: config.Source, tokenizer: Tokenizer) -> Iterator[Example]:
    """Read the examples of a source of JSON lines.

    Args:
        source: the source.
        tokenizer: encodes text.

    Yields:
        the examples in order.

    Raises:
        FileNotFoundError: the source's path does not exist.
        ValueError: a file is of another format, or a line is no example.
    """
    paths = [] if source.path in config.BUILT_IN else files.list_files(source.path)
    other = next((path for path in paths if files.file_format(path) != "jsonl"), None)
    if not paths or other is not None:
        raise ValueError(f"source {other or source.path}: examples are read from JSON lines")
    for path in paths:
        with readers.open_lines(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield parse_example(line, f"{path}:{number}", tokenizer)


def parse_example(line: str | bytes, name: str, tokenizer: Tokenizer) -> Example:
    """Read one line.

    Args:
        line: JSON, an object in one of the module's forms.
        name: for messages.
        tokenizer: encodes text.

    Returns:
        the example.

    Raises:
        ValueError: the line is no example, or nothing in it could train.
    """
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{name}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{name}: must be a JSON object, is {type(entry).__name__}")
    given = [form for form in FORMS if all(field in entry for field in form)]
    if len(given) != 1:
        forms = "; ".join(" and ".join(form) for form in FORMS)
        raise ValueError(f"{name}: an example has the fields of one of: {forms}")
    try:
        tokens, trained = _encode(given[0][0], entry, tokenizer)
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # what stands in the fields
        raise ValueError(f"{name}: not an example: {error}") from error
    if not trained[1:].any():
        raise ValueError(f"{name}: no token trains that another comes before")
    return Example(name, tokens, trained)


def _encode(form: str, entry: dict[str, Any], tokenizer: Tokenizer) -> tuple[Any, Any]:
    """Return ids and which of them train."""
    if form == "prompt":
        # Apart, as they are when a response is drawn.
        prompt, response = (
            encoding.encode_text(entry[field], tokenizer) for field in ("prompt", "response")
        )
        trained = np.arange(len(prompt) + len(response)) >= len(prompt)
        return np.array([*prompt, *response], np.int32), trained
    if form == "messages":
        found = encoding.encode_to_tokens(
            entry["messages"],
            tokenizer,
            thinking_mode=entry.get("thinking_mode", "chat"),
            tools_block=entry.get("tools_block"),
        )
        return found.ids, found.trainable
    tokens, trained = np.array(entry["tokens"]), np.array(entry["trained"])
    if tokens.ndim != 1 or tokens.dtype.kind != "i" or (tokens < 0).any():
        raise ValueError("tokens must be a list of ids")
    if trained.shape != tokens.shape or not np.isin(trained, (0, 1)).all():
        raise ValueError(f"trained must hold 0 or 1 for each of {len(tokens)} tokens")
    return tokens.astype(np.int32), trained.astype(bool)
