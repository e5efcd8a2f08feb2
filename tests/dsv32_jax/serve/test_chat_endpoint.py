import json

import openai
import pytest

from dsv32_jax.encoding import markup
from dsv32_jax.tokenizer import ByteTokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


def ask(server, content, *, thinking=None, **options):
    extra = {} if thinking is None else {"thinking": {"type": thinking}}
    if "top_k" in options:
        extra["top_k"] = options.pop("top_k")
    return server.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], extra_body=extra, **options
    )


def gather(stream):
    """Add up a stream's deltas; return (content, reasoning, calls, finish reason, chunks) of choice 0."""
    content, reasoning, calls, reason, chunks = "", "", {}, None, list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != 0:
                continue
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": part.id, "name": "", "arguments": ""})
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
            assert reason is None
            reason = choice.finish_reason
    return content, reasoning, list(calls.values()), reason, chunks


def test_an_answer_has_text_reason_and_counts(server):
    answer = ask(server, "script=hello")
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "Grüße, world"
    assert choice.finish_reason == "stop"
    assert not hasattr(choice, "problems")
    assert answer.object == "chat.completion"
    assert answer.usage.completion_tokens == len("Grüße, world".encode()) + 1  # with the end
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_in_pieces(server):
    stream = ask(server, "script=hello", stream=True, stream_options={"include_usage": True})
    content, _, _, reason, chunks = gather(stream)
    assert (content, reason) == ("Grüße, world", "stop")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 10
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len("Grüße, world".encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_events_are_server_sent_events_that_end_in_done(server):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "script=hello"}]}
    response = server.http.post("/v1/chat/completions", json=body | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert "usage" not in chunks[-1]

    body |= {"stream": True, "stream_options": {"include_usage": True}}
    events = server.http.post("/v1/chat/completions", json=body).text.split("\n\n")[:-2]
    usages = [json.loads(event.removeprefix("data: "))["usage"] for event in events]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1]["completion_tokens"] > 0


def test_a_drawn_answer_is_the_same_streamed_or_not(server):
    options = {"seed": 5, "max_tokens": 24}
    whole = ask(server, "hi", **options).choices[0]
    content, _, _, reason, _ = gather(ask(server, "hi", stream=True, **options))
    assert (content, reason) == (whole.message.content, whole.finish_reason)
    assert content


def test_choices_have_seeds_that_count_up(server):
    together = ask(server, "hi", seed=7, n=3, max_tokens=8).choices
    assert [choice.index for choice in together] == [0, 1, 2]
    alone = [ask(server, "hi", seed=7 + i, max_tokens=8).choices[0] for i in range(3)]
    assert [c.message.content for c in together] == [c.message.content for c in alone]
    assert len({choice.message.content for choice in together}) == 3


def test_a_seed_gives_the_same_text_whatever_else_runs(server):
    alone = ask(server, "hi", seed=9, max_tokens=12).choices[0].message.content
    with ask(server, "script=long", stream=True) as other:
        next(other)
        assert ask(server, "hi", seed=9, max_tokens=12).choices[0].message.content == alone


def test_requests_without_a_seed_differ(server):
    texts = {ask(server, "hi", max_tokens=12).choices[0].message.content for _ in range(2)}
    assert len(texts) == 2


def test_temperature_and_top_k_reach_the_engine(server):
    likeliest = ask(server, "hi", temperature=0, max_tokens=8).choices[0].message.content
    top = ask(server, "hi", top_k=1, seed=3, max_tokens=8).choices[0].message.content
    small_p = ask(server, "hi", top_p=1e-6, seed=4, max_tokens=8).choices[0].message.content
    assert likeliest == top == small_p


@pytest.mark.parametrize("stop", ["wor", ["zzz", "wor"]])
def test_a_stop_string_ends_the_text_before_it(server, stop):
    choice = ask(server, "script=hello", stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Grüße, ", "stop")
    content, _, _, reason, _ = gather(ask(server, "script=hello", stop=stop, stream=True))
    assert (content, reason) == ("Grüße, ", "stop")


def test_a_stop_string_frees_the_slot_at_once(server):
    before = server.engine.stats.drawn_tokens
    answer = ask(server, "script=long", stop="aaa")
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("", 3)
    assert server.engine.stats.drawn_tokens - before < 500  # of 1000
    assert server.engine.n_running == 0


def test_a_limit_ends_the_text_with_length(server):
    answer = ask(server, "script=hello", max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert not hasattr(answer.choices[0], "problems")
    assert answer.choices[0].message.content == "Gr\ufffd"
    assert answer.usage.completion_tokens == 3


def test_each_token_has_its_log_probability(server):
    choice = ask(server, "script=hello", logprobs=True).choices[0]
    tokens = choice.logprobs.content
    assert b"".join(bytes(t.bytes) for t in tokens if t.bytes) == b"Gre, world"
    assert len(tokens) == len("Grüße, world".encode())
    assert all(t.logprob <= 0 and t.top_logprobs == [] for t in tokens)
    chunks = gather(ask(server, "script=hello", logprobs=True, stream=True))[-1]
    found = [c.choices[0].logprobs for c in chunks if c.choices]
    streamed = [token for one in found if one for token in one.content]
    assert [t.token for t in streamed] == [t.token for t in tokens]


def test_greedy_tokens_are_certain(server):
    tokens = ask(server, "hi", temperature=0, max_tokens=4, logprobs=True).choices[0].logprobs
    assert [t.logprob for t in tokens.content] == [0.0] * 4


def test_reasoning_is_apart_from_content(server):
    message = ask(server, "script=thought", thinking="enabled").choices[0].message
    assert (message.reasoning_content, message.content) == ("So, so.", "Yes.")
    stream = ask(server, "script=thought", thinking="enabled", stream=True)
    assert gather(stream)[:2] == ("Yes.", "So, so.")


def test_the_prompt_opens_the_reasoning_or_says_that_there_is_none(server):
    thinks, chats = (
        ask(server, "script=thought", thinking=kind).usage.prompt_tokens
        for kind in ("enabled", "disabled")
    )
    assert thinks - chats == len(markup.THINK_START) - len(markup.THINK_END)


class OtherEnd(ByteTokenizer):
    """Ends its texts with another token than the chat format does."""

    def token_id(self, text):
        return self.pad_id if text == markup.EOS else super().token_id(text)


def test_the_end_of_the_chat_format_ends_a_message_but_no_plain_text(serve):
    with serve(tokenizer=OtherEnd()) as server:
        (choice,) = ask(server, "script=otherend", max_tokens=20).choices
        plain = {"model": "tiny", "prompt": "script=otherend", "max_tokens": 6, "logprobs": 0}
        (text,) = server.client.completions.create(**plain).choices
    assert (choice.message.content, choice.finish_reason) == ("Hi.", "stop")
    assert not hasattr(choice, "problems")
    assert (text.text, text.finish_reason) == ("Hi.An", "length")
    assert text.logprobs.tokens == ["H", "i", ".", "", "A", "n"]


def test_templates_know_the_switch_by_another_name(server):
    answer = server.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "script=thought"}],
        extra_body={"chat_template_kwargs": {"thinking": True}},
    )
    assert answer.choices[0].message.reasoning_content == "So, so."


@pytest.mark.parametrize(("script", "thinking"), [("call", "disabled"), ("thoughtcall", "enabled")])
def test_a_tool_is_called_and_its_result_goes_back(server, script, thinking):
    extra = {"thinking": {"type": thinking}}
    messages = [{"role": "user", "content": f"script={script}"}]
    common = {"model": "tiny", "tools": TOOLS, "extra_body": extra}
    choice = server.client.chat.completions.create(messages=messages, **common).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"a": 1, "b": "zwei"}

    result = {"role": "tool", "tool_call_id": call.id, "content": "script=thought"}
    messages += [choice.message.model_dump(), result]
    final = server.client.chat.completions.create(messages=messages, **common).choices[0]
    content = "Yes." if thinking == "enabled" else "So, so.Yes."
    assert (final.message.content, final.finish_reason) == (content, "stop")


def test_a_streamed_call_adds_up_to_the_whole_one(server):
    content, _, calls, reason, _ = gather(ask(server, "script=call", tools=TOOLS, stream=True))
    assert (content, reason) == ("I add.", "tool_calls")
    (call,) = calls
    assert call["id"].startswith("call_")
    assert call["name"] == "add"
    assert json.loads(call["arguments"]) == {"a": 1, "b": "zwei"}


def test_tools_are_in_the_prompt_unless_they_are_not_to_be_used(server):
    def n_prompt(**options):
        return ask(server, "script=hello", **options).usage.prompt_tokens

    bare = n_prompt()
    assert n_prompt(tools=TOOLS) > bare + len(json.dumps(TOOLS[0]["function"]))
    assert n_prompt(tools=TOOLS, tool_choice="none") == bare
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    assert n_prompt(response_format=form) > bare
    assert n_prompt(response_format={"type": "text"}) == bare


def test_a_broken_call_is_left_out_and_reported(server):
    choice = ask(server, "script=broken", tools=TOOLS).choices[0]
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert choice.problems[0]["kind"]
    chunks = gather(ask(server, "script=broken", tools=TOOLS, stream=True))[-1]
    assert chunks[-1].choices[0].problems == choice.problems


def test_a_wrong_field_is_named_in_openais_form(server):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, "hi", top_p=2)
    assert caught.value.body == {
        "message": "top_p=2.0 must be in (0, 1]",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": "invalid_value",
    }


def test_messages_without_a_text_are_refused(server):
    messages = [{"role": "tool", "tool_call_id": "x", "content": "1"}]
    with pytest.raises(openai.BadRequestError, match="follow"):
        server.client.chat.completions.create(model="tiny", messages=messages)


def test_another_model_is_not_found(server):
    with pytest.raises(openai.NotFoundError, match="tiny"):
        server.client.chat.completions.create(model="x", messages=[])
