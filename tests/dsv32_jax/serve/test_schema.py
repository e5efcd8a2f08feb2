import pytest

from dsv32_jax.serve import schema
from dsv32_jax.serve.config import NO_LIMIT
from dsv32_jax.serve.errors import ApiError

USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {"model": "m", "messages": [USER]}
TEXT = {"model": "m", "prompt": "hi"}


def chat(**changes):
    return schema.read_chat(CHAT | changes, model="m", thinking=False)


def text(**changes):
    return schema.read_text(TEXT | changes, model="m")


def refused(read, **changes):
    with pytest.raises(ApiError) as caught:
        read(**changes)
    assert caught.value.status == 400
    return caught.value.param, caught.value.code


INVALID = {
    "messages": [None, [], "hi", [USER, {"role": "assistant", "content": "x"}]],
    "stream": [1, "true"],
    "temperature": [-1, "1", True, 10**400, 1e-5],
    "top_p": [0, 1.5],
    "top_k": [-1, 1.0],
    "seed": [-1, 2**32, 1.5],
    "max_tokens": [0, 2.0],
    "max_completion_tokens": [0],
    "n": [0, 129],
    "stop": ["", [""], 5, ["x"] * 17, ["x", 1]],
    "top_logprobs": [-1, 21],
    "stream_options": [{"include_usage": True}],
    "thinking": ["on"],
    "thinking.type": [],
    "metadata": ["x"],
    "user": [5],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in INVALID.items() for value in values]
)
def test_a_wrong_value_is_named(field, value):
    assert refused(chat, **{field: value}) == (field, "invalid_value")


UNSUPPORTED = {
    "frequency_penalty": 0.5,
    "presence_penalty": 1,
    "logit_bias": {"5": 1},
    "store": True,
    "service_tier": "flex",
    "parallel_tool_calls": False,
    "modalities": ["audio"],
    "reasoning_effort": "low",
    "top_logprobs": 3,
    "tool_choice": "required",
    "functions": [{"name": "f"}],
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_would_have_no_effect_is_refused(field):
    assert refused(chat, **{field: UNSUPPORTED[field]}) == (field, "unsupported")


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("suffix", "x"), ("best_of", 2)])
def test_plain_texts_have_fields_of_their_own(field, value):
    assert refused(text, **{field: value}) == (field, "unsupported")


def test_unknown_names_are_refused():
    assert refused(chat, temprature=1) == ("temprature", "unknown_field")
    assert refused(text, messages=[]) == ("messages", "unknown_field")
    options = {"stream": True, "stream_options": {"x": 1}}
    assert refused(chat, **options) == ("stream_options.x", "unknown_field")
    assert refused(chat, thinking={"type": "disabled", "x": 1}) == ("thinking.x", "unknown_field")


def test_fields_that_ask_for_nothing_are_fine():
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "store": False}
    harmless = {"user": "u", "metadata": {"a": "b"}, "stop": None, "tools": None, "n": None}
    assert len(chat(**neutral, **harmless, parallel_tool_calls=True).params) == 1
    assert text(**neutral, echo=False, best_of=1).prompt == "hi"


def test_defaults_are_openais():
    ask = chat()
    (params,) = ask.params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert params.max_tokens == NO_LIMIT
    assert not (ask.stream)
    assert not (ask.include_usage)
    assert not (ask.logprobs)
    assert not (ask.thinking)
    assert not (ask.stop)


def test_seeds_go_round():
    assert [p.seed for p in chat(seed=2**32 - 1, n=3).params] == [2**32 - 1, 0, 1]


def test_the_newer_name_of_the_limit_wins():
    assert chat(max_tokens=5).params[0].max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=3).params[0].max_tokens == 3


def test_thinking_is_switched_by_either_name():
    assert chat(thinking={"type": "enabled"}).thinking
    assert chat(chat_template_kwargs={"thinking": True}).thinking
    assert schema.read_chat(CHAT, model="m", thinking=True).thinking
    off = CHAT | {"thinking": {"type": "disabled"}}
    assert not schema.read_chat(off, model="m", thinking=True).thinking
    both = {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}}
    assert refused(chat, **both) == ("thinking", "invalid_value")
    assert chat(**both | {"chat_template_kwargs": {}}).thinking
    assert refused(chat, chat_template_kwargs={"x": 1})[1] == "unknown_field"


def test_text_parts_are_put_together():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == "ab"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    where = ("messages[0].content[0].type", "unsupported")
    assert refused(chat, messages=[{"role": "user", "content": image}]) == where


def test_tools_go_to_the_system_message():
    tool = {"type": "function", "function": {"name": "f"}}
    (system, _) = chat(tools=[tool]).messages
    assert system == {"role": "system", "content": "", "tools": [tool]}
    given = [{"role": "system", "content": "Be."}, USER]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    (system, _) = chat(messages=given, tools=[tool], response_format=form).messages
    assert (system["content"], system["response_format"]) == ("Be.", {"type": "null"})
    (system, _) = chat(response_format={"type": "json_object"}).messages
    assert system["response_format"] == {"type": "object"}


def test_nothing_holds_the_model_to_a_schema():
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    assert refused(chat, tools=[strict]) == ("tools[0].function.strict", "unsupported")
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True}}
    where = ("response_format.json_schema.strict", "unsupported")
    assert refused(chat, response_format=form) == where


def test_results_are_put_in_the_order_of_their_calls():
    calls = {"role": "assistant", "tool_calls": [CALL, CALL | {"id": "b"}]}
    b, a = ({"role": "tool", "tool_call_id": name, "content": name} for name in "ba")
    found = chat(messages=[USER, calls, b, a]).messages
    assert [message["content"] for message in found[2:]] == ["a", "b"]
    where = ("messages[1].tool_calls", "invalid_value")
    assert refused(chat, messages=[USER, calls, a]) == where
    assert refused(chat, messages=[USER, calls, a, a]) == where


def test_an_answer_may_come_back_as_the_client_has_it():
    echoed = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": "so",
        "tool_calls": [CALL],
    }
    result = {"role": "tool", "tool_call_id": "a", "content": "1"}
    assert chat(messages=[USER, echoed, result]).messages[1]["reasoning_content"] == "so"
    named = USER | {"name": "Ann"}
    assert refused(chat, messages=[named]) == ("messages[0].name", "unknown_field")


def test_a_prompt_is_one_text_or_one_list_of_ids():
    assert text(prompt=[1, 2]).prompt == (1, 2)
    for prompt in (None, ["a", "b"], [[1]], [True], 5):
        assert refused(text, prompt=prompt) == ("prompt", "invalid_value")
