"""The bodies of completion requests, checked: what has no effect here is an error, not ignored."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsv32_jax.encoding.messages import Message
from dsv32_jax.generate.sampling import MAX_SEED, SamplingParams
from dsv32_jax.serve import conversation, errors
from dsv32_jax.serve.config import NO_LIMIT
from dsv32_jax.serve.fields import Fields

MAX_CHOICES = 128  # as in OpenAI's API
MAX_STOPS = 16
TEXT_MAX_TOKENS = 16  # default of OpenAI's /v1/completions

# Fields of OpenAI's API that do nothing here, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
CHAT_NEUTRAL = NEUTRAL | {
    "audio": (),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "verbosity": (),
    "web_search_options": (),
}
TEXT_NEUTRAL = NEUTRAL | {"best_of": (1,), "echo": (False,), "suffix": ("",)}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What both kinds of request have in common.

    Attributes:
        params: How each choice is drawn.
        stop: Strings that end a text.
        stream: Whether the answer comes piece by piece.
        include_usage: Whether a stream ends with the counts of tokens.
        logprobs: Whether each token's log-probability is wanted.
    """

    params: tuple[SamplingParams, ...]
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool


@dataclass(frozen=True, kw_only=True)
class ChatAsk(Ask):
    """A body of /v1/chat/completions.

    Attributes:
        messages: As the encoder takes them, tools and response format among them.
        thinking: Whether the model reasons first.
    """

    messages: tuple[Message, ...]
    thinking: bool


@dataclass(frozen=True, kw_only=True)
class TextAsk(Ask):
    """A body of /v1/completions.

    Attributes:
        prompt: Text, or token ids.
    """

    prompt: str | tuple[int, ...]


def read_chat(raw: Any, *, model: str, thinking: bool) -> ChatAsk:
    """Check a body of /v1/chat/completions.

    Args:
        raw: The JSON.
        model: The name that the server has for its model.
        thinking: Whether the model reasons where the body does not say.

    Returns:
        What it asks for.

    Raises:
        ApiError: A field is wrong, unknown or unsupported.
    """
    fields = Fields(raw)
    _check_model(fields, model)
    messages = conversation.read(fields)
    thinking = _read_thinking(fields, thinking)
    logprobs = fields.boolean("logprobs", False)
    if fields.integer("top_logprobs", 0, low=0, high=20) > 0:
        raise errors.unsupported("top_logprobs", "above 0 is not supported")
    most = fields.integer("max_tokens", NO_LIMIT, low=1, high=NO_LIMIT)
    most = fields.integer("max_completion_tokens", most, low=1, high=NO_LIMIT)
    common = _read_common(fields, max_tokens=most, logprobs=logprobs)
    fields.end(CHAT_NEUTRAL)
    return ChatAsk(messages=messages, thinking=thinking, **common)


def read_text(raw: Any, *, model: str) -> TextAsk:
    """Check a body of /v1/completions.

    Args:
        raw: The JSON.
        model: The name that the server has for its model.

    Returns:
        What it asks for.

    Raises:
        ApiError: A field is wrong, unknown or unsupported.
    """
    fields = Fields(raw)
    _check_model(fields, model)
    prompt = fields.any("prompt")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple):
        raise fields.wrong("prompt", "must be one text, or one array of token ids")
    logprobs = fields.has("logprobs")
    if fields.integer("logprobs", 0, low=0, high=5) > 0:
        raise errors.unsupported("logprobs", "above 0 is not supported")
    most = fields.integer("max_tokens", TEXT_MAX_TOKENS, low=1, high=NO_LIMIT)
    common = _read_common(fields, max_tokens=most, logprobs=logprobs)
    fields.end(TEXT_NEUTRAL)
    return TextAsk(prompt=prompt, **common)


def _check_model(fields: Fields, served: str) -> None:
    model = fields.text("model")
    if model != served:
        message = f"there is no model {model!r}; this server has {served!r}"
        raise errors.ApiError(404, message, param="model", code="model_not_found")


def _read_common(fields: Fields, *, max_tokens: int, logprobs: bool) -> dict[str, Any]:
    stream = fields.boolean("stream", False)
    include_usage = False
    if fields.has("stream_options"):
        if not stream:
            raise fields.wrong("stream_options", "works with stream=true")
        options = Fields(fields.any("stream_options"), "stream_options")
        include_usage = options.boolean("include_usage", False)
        options.end({"include_obfuscation": (False,)})
    fields.text("user", "")
    Fields(fields.any("metadata", {}), "metadata")
    return {
        "params": _read_params(fields, max_tokens),
        "stop": _read_stop(fields),
        "stream": stream,
        "include_usage": include_usage,
        "logprobs": logprobs,
    }


def _read_params(fields: Fields, max_tokens: int) -> tuple[SamplingParams, ...]:
    """Read how choices are drawn; each has a seed of its own, so that they differ."""
    n = fields.integer("n", 1, low=1, high=MAX_CHOICES)
    seed = fields.integer("seed", int.from_bytes(os.urandom(4)), low=0, high=MAX_SEED)
    temperature = fields.number("temperature", 1.0)
    top_p = fields.number("top_p", 1.0)
    top_k = fields.integer("top_k", 0, low=0, high=NO_LIMIT)

    def params(i: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=(seed + i) % (MAX_SEED + 1),
            max_tokens=max_tokens,
        )

    return tuple(_checked(functools.partial(params, i)) for i in range(n))


def _checked(make: Callable[[], SamplingParams]) -> SamplingParams:
    try:
        return make()
    except ValueError as error:  # "top_p=2.0 must be in (0, 1]"
        raise errors.invalid(str(error).partition("=")[0], str(error)) from error


def _read_stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.any("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise fields.wrong("stop", "must be a text or an array of texts, none of them empty")
    if len(stops) > MAX_STOPS:
        raise fields.wrong("stop", f"has {len(stops)} texts, {MAX_STOPS} are allowed")
    return tuple(stops)


def _read_thinking(fields: Fields, default: bool) -> bool:
    """Read the switch, which DeepSeek's API and chat templates spell differently."""
    found = []
    if fields.has("thinking"):
        switch = Fields(fields.any("thinking"), "thinking")
        kind = switch.text("type")
        if kind not in ("enabled", "disabled"):
            raise switch.wrong("type", 'must be "enabled" or "disabled"')
        switch.end()
        found.append(kind == "enabled")
    if fields.has("chat_template_kwargs"):
        options = Fields(fields.any("chat_template_kwargs"), "chat_template_kwargs")
        if options.has("thinking"):
            found.append(options.boolean("thinking", default))
        options.end()
    if len(set(found)) > 1:
        raise fields.wrong("thinking", "and chat_template_kwargs.thinking disagree")
    return found[0] if found else default
