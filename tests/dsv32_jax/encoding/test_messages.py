import copy
import hashlib
import json

import pytest

from dsv32_jax.encoding import EncodingError, encode_messages, read_tools_block

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
GOLDEN_SHA256 = "e890cc071cb8ca4e78f0b4ef8dd4cd8545c692f1e70a8a9d1ed6e741e8c50d5c"  # facts, 8.2
BLOCK = "TOOLS[{tool_schemas}]"
FORMAT_BLOCK = "FORMAT[{schema}]"
TOOLS = [{"type": "function", "function": {"name": "f", "description": "搜"}}]
SCHEMA = {"type": "object"}


def system(content="S", **more):
    return {"role": "system", "content": content, **more}


def user(content="U", **more):
    return {"role": "user", "content": content, **more}


def developer(content="D", **more):
    return {"role": "developer", "content": content, **more}


def assistant(content=None, **more):
    return {"role": "assistant", "content": content, **more}


def tool(content="R"):
    return {"role": "tool", "content": content, "tool_call_id": "any"}


def call(name="f", arguments="{}"):
    return {"id": "any", "type": "function", "function": {"name": name, "arguments": arguments}}


def calls_text(*names):
    invokes = "".join(f'<｜DSML｜invoke name="{name}">\n\n</｜DSML｜invoke>\n' for name in names)
    return f"\n\n<｜DSML｜function_calls>\n{invokes}</｜DSML｜function_calls>"


def encode(*messages, mode="thinking", **options):
    options = {"tools_block": BLOCK, "response_format_block": FORMAT_BLOCK, **options}
    return encode_messages(messages, thinking_mode=mode, **options)


def test_the_official_golden_conversation_is_met_byte_for_byte(official_data):
    request = json.loads((official_data / "golden_1_input.json").read_text(encoding="utf-8"))
    messages = request["messages"]
    messages[0]["tools"] = request["tools"]
    golden = (official_data / "golden_1_output.txt").read_text(encoding="utf-8")

    text = encode_messages(
        messages,
        thinking_mode="thinking",
        tools_block=read_tools_block(official_data / "tools_preamble.txt"),
    )

    assert text == golden.removesuffix("\n")
    assert len(text) == 4226
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN_SHA256


def test_a_conversation_in_thinking_mode_hides_old_reasoning_and_opens_new():
    # Facts, 8.1, the published check: the ids of that list, spelled.
    assert encode(
        user("hello"),
        assistant("Hello! I am DeepSeek.", reasoning_content="thinking..."),
        user("1+1=?"),
    ) == (
        f"{BOS}<｜User｜>hello<｜Assistant｜></think>Hello! I am DeepSeek.{EOS}"
        "<｜User｜>1+1=?<｜Assistant｜><think>"
    )


def test_chat_mode_closes_thinking_after_every_user_and_writes_no_reasoning():
    assert encode(user("a"), assistant("b", reasoning_content="r"), user("c"), mode="chat") == (
        f"{BOS}<｜User｜>a<｜Assistant｜></think>b{EOS}<｜User｜>c<｜Assistant｜></think>"
    )
    assert encode(user("a"), assistant("b", reasoning_content="r"), mode="chat") == (
        f"{BOS}<｜User｜>a<｜Assistant｜></think>b{EOS}"
    )


def test_system_messages_have_no_token_and_stand_where_they_are():
    assert encode(system("one"), user("a"), system("two")) == (
        f"{BOS}one<｜User｜>a<｜Assistant｜><think>two"
    )
    assert encode(system(None), system("")) == BOS


def test_tools_and_response_format_follow_the_system_text_after_empty_lines():
    schema_line = '{"name": "f", "description": "搜"}'
    assert encode(system("S", tools=TOOLS, response_format=SCHEMA)) == (
        f'{BOS}S\n\nTOOLS[{schema_line}]\n\nFORMAT[{{"type": "object"}}]'
    )
    assert encode(system("S", tools=TOOLS * 2)) == f"{BOS}S\n\nTOOLS[{schema_line}\n{schema_line}]"
    assert encode(system("S", tools=[], response_format=None)) == f"{BOS}S"


def test_braces_and_backslashes_in_schemas_and_blocks_mean_themselves():
    tools = [{"function": {"pattern": "\\d{3} {tool_schemas}"}}]
    block = "{x} \\1 {{ {tool_schemas}"
    assert encode(system("", tools=tools), tools_block=block) == (
        BOS + '\n\n{x} \\1 {{ {"pattern": "\\\\d{3} {tool_schemas}"}'
    )


def test_a_users_tools_are_not_read_and_a_missing_content_is_the_text_none():
    assert encode(user(None, tools=TOOLS, response_format=SCHEMA)) == (
        f"{BOS}<｜User｜>None<｜Assistant｜><think>"
    )


def test_a_developer_message_wraps_its_content_and_counts_as_the_last_user():
    assert encode(
        user("a"), assistant("b"), developer("D", tools=TOOLS, response_format=SCHEMA)
    ) == (
        f"{BOS}<｜User｜>a<｜Assistant｜></think>b{EOS}"
        '<｜User｜>\n\nTOOLS[{"name": "f", "description": "搜"}]\n\nFORMAT[{"type": "object"}]'
        "\n\n# The user's message is: D<｜Assistant｜><think>"
    )


def test_the_current_turn_keeps_the_reasoning_of_every_step():
    text = encode(
        user(),
        assistant(reasoning_content="r1", tool_calls=[call("f"), call("g")]),
        tool("x"),
        tool("y"),
        assistant("done", reasoning_content="r2"),
    )
    assert text == (
        f"{BOS}<｜User｜>U<｜Assistant｜><think>r1</think>{calls_text('f', 'g')}{EOS}"
        "\n\n<function_results>\n<result>x</result>\n<result>y</result>\n</function_results>"
        f"\n\n<think>r2</think>done{EOS}"
    )


def test_calls_and_results_of_an_old_turn_stay_without_its_reasoning():
    text = encode(
        user("a"),
        assistant("c", reasoning_content="r1", tool_calls=[call()]),
        tool("x"),
        assistant("done", reasoning_content="r2"),
        user("b"),
    )
    assert text == (
        f"{BOS}<｜User｜>a<｜Assistant｜></think>c{calls_text('f')}{EOS}"
        "\n\n<function_results>\n<result>x</result>\n</function_results>"
        f"\n\n</think>done{EOS}<｜User｜>b<｜Assistant｜><think>"
    )


def test_calls_without_reasoning_close_the_thinking_at_once():
    assert encode(user(), assistant(tool_calls=[call()])).endswith(
        f"<think></think>{calls_text('f')}{EOS}"
    )


def test_a_conversation_without_a_user_is_wholly_current():
    assert encode(assistant("a", reasoning_content="r")) == f"{BOS}r</think>a{EOS}"


def test_a_result_without_content_is_the_text_none():
    assert "\n<result>None</result>\n" in encode(user(), assistant(tool_calls=[call()]), tool(None))


def test_missing_results_leave_their_block_open():
    text = encode(user(), assistant(tool_calls=[call("f"), call("g")]), tool("x"))
    assert text.endswith(f"{EOS}\n\n<function_results>\n<result>x</result>")


@pytest.mark.parametrize("drop_thinking", [True, False])
def test_dropping_changes_nothing_without_developers(drop_thinking):
    text = encode(
        user("a"), assistant("b", reasoning_content="r"), user("c"), drop_thinking=drop_thinking
    )
    assert "</think>b" in text
    assert "r</think>" not in text


def test_context_counts_but_is_not_written():
    context = [system(tools=TOOLS), user("a"), assistant(tool_calls=[call("f"), call("g")])]
    first = [tool("x")]

    assert encode(*first, context=context) == "\n\n<function_results>\n<result>x</result>"
    assert encode(tool("y"), context=[*context, *first]) == (
        "\n<result>y</result>\n</function_results>\n\n<think>"
    )
    # A context that ends before an old turn: the last user is among the messages.
    assert encode(assistant("b", reasoning_content="r"), user("c"), context=[user("a")]) == (
        f"b{EOS}<｜User｜>c<｜Assistant｜><think>"
    )


def test_the_text_in_pieces_of_context_is_the_whole_text():
    conversation = [
        system(tools=TOOLS),
        user("a"),
        assistant("c", reasoning_content="r", tool_calls=[call()]),
        tool(),
        assistant("d", reasoning_content="r"),
    ]
    pieces = [encode(conversation[i], context=conversation[:i]) for i in range(len(conversation))]
    assert "".join(pieces) == encode(*conversation)


def test_bos_can_be_left_out():
    assert encode(system(), add_bos=False) == "S"
    assert encode() == BOS
    assert encode(context=[user()]) == ""


def test_a_developer_message_before_the_last_user_is_an_error_when_thinking_is_dropped():
    messages = [developer("a"), assistant("b"), user("c")]
    with pytest.raises(EncodingError, match="message 0 \\(developer\\): in thinking mode"):
        encode(*messages)
    with pytest.raises(EncodingError, match="message 0 \\(developer\\)"):
        encode(*messages[1:], context=messages[:1])
    assert encode(context=messages) == ""
    assert "is: a<｜Assistant｜></think>b" in encode(*messages, drop_thinking=False)
    assert "is: a<｜Assistant｜></think>b" in encode(*messages, mode="chat")


def test_messages_are_left_as_they_were():
    messages = [user("a"), assistant("b", reasoning_content="r"), user("c")]
    before = copy.deepcopy(messages)
    encode(*messages)
    assert messages == before


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "robot", "content": ""}], "message 0: role='robot' must be one of"),
        ([{"content": ""}], "role=None must be one of"),
        ([developer("")], "message 0 .developer.: content must not be empty"),
        ([developer(None)], "content must not be empty"),
        ([tool()], "message 0 .tool.: it must follow an assistant message"),
        ([user(), tool()], "message 1 .tool.: it must follow an assistant message"),
        ([user(), assistant("a", reasoning_content="r"), tool()], "1 of a turn with 0 tool calls"),
        ([user(), assistant(tool_calls=[call()]), tool(), tool()], "2 of a turn with 1 tool calls"),
        ([user(), assistant("a")], "message 1 .assistant.: in thinking mode it needs"),
        ([user(), assistant("a", reasoning_content="")], "in thinking mode it needs"),
        ([assistant(tool_calls=[call(arguments="{'a'}")])], r"tool_calls\[0\] .f.: .*valid JSON"),
        ([assistant(tool_calls=[call(arguments="[" * 100_000)])], "not valid JSON"),
        ([assistant(tool_calls=[call(arguments="[1]")])], "must be a JSON object"),
        ([assistant(tool_calls=[call(arguments={"a": 1})])], "must be a JSON string, not dict"),
        ([assistant(tool_calls=[{"name": "f"}])], r"tool_calls\[0\] must be an object with"),
        ([system(tools=[{"name": "f"}])], r'tools\[0\] must be an object with a "function"'),
        ([user([{"type": "text"}])], "message 0 .user.: content must be a string, not list"),
        ([assistant(reasoning_content=3)], "reasoning_content must be a string, not int"),
        ([system(tools=5)], "tools must be a list, not int"),
        ([assistant(tool_calls=1.5)], "tool_calls must be a list, not float"),
        ([system(tools=[{"function": {1, 2}}])], "a set has no JSON form"),
        ([user("half \ud83d")], "content holds half a character"),
        ([assistant(tool_calls=[call(arguments='{"a": ["\\ud83d"]}')])], "a list has no JSON form"),
    ],
)
def test_what_has_no_text_in_the_format_is_an_error_that_says_where(messages, words):
    with pytest.raises(EncodingError, match=words) as caught:
        encode(*messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["", "Thinking", "none"])
def test_an_unknown_mode_is_an_error_even_without_messages(mode):
    with pytest.raises(EncodingError, match="must be one of chat, thinking"):
        encode(mode=mode)


@pytest.mark.parametrize("block", ["no place", "{tool_schemas}{tool_schemas}"])
def test_a_block_without_one_place_for_the_schemas_is_an_error(block):
    with pytest.raises(EncodingError, match=r"must hold \{tool_schemas\} exactly once"):
        encode(system(tools=TOOLS), tools_block=block)


def test_the_error_is_a_value_error():
    assert issubclass(EncodingError, ValueError)
