import numpy as np
import pytest

from dsv32_jax import tokenizer
from dsv32_jax.encoding import (
    EncodingError,
    SpecialTokens,
    append_turn,
    decode_text,
    encode_messages,
    encode_text,
    encode_to_tokens,
    parse_completion,
)

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
BYTES = tokenizer.ByteTokenizer()


def call(name, arguments="{}"):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def user(content):
    return {"role": "user", "content": content}


def result(content):
    return {"role": "tool", "content": content}


def assistant(content="", reasoning="", *calls):
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": list(calls),
    }


STEP = assistant("Let me look.", "first", call("f", '{"q": "明天"}'), call("g"))
CONVERSATION = [
    {"role": "system", "content": "Be brief.", "tools": [{"function": {"name": "f"}}]},
    user("hello"),
    assistant("Hi!", "old thoughts"),
    user("weather?"),
    STEP,
    result("cloudy"),
    result("12"),
    assistant("Cloudy.", "second"),
]


@pytest.fixture(params=["official", "foreign", "bytes"])
def any_tokenizer(request, official_tokenizer, foreign_tokenizer):
    return {"official": official_tokenizer, "foreign": foreign_tokenizer, "bytes": BYTES}[
        request.param
    ]


def produced(tokenized, tok):
    """Return the text of each run of tokens that the model produced."""
    edges = np.flatnonzero(np.diff(tokenized.trainable.astype(int), prepend=0, append=0))
    return [decode_text(tokenized.ids[i:j], tok) for i, j in edges.reshape(-1, 2)]


def test_special_tokens_are_found_by_their_official_texts(official_tokenizer):
    assert SpecialTokens.from_tokenizer(official_tokenizer) == SpecialTokens(
        bos=0, eos=1, user=2, assistant=3, think_start=4, think_end=5, dsml=6
    )


def test_where_a_tokenizer_has_no_official_tokens_its_own_ends_stand_in(foreign_tokenizer):
    missing = {"user": None, "assistant": None, "think_start": None, "think_end": None}
    assert SpecialTokens.from_tokenizer(BYTES) == SpecialTokens(
        bos=256, eos=257, dsml=None, **missing
    )
    assert SpecialTokens.from_tokenizer(foreign_tokenizer) == SpecialTokens(
        bos=None, eos=0, dsml=None, **missing
    )


def test_bytes_spell_everything_but_the_two_ends_of_a_text():
    text = f"{BOS}a<think>é{EOS}"
    assert encode_text(text, BYTES) == [256, *"a<think>é".encode(), 257]
    assert decode_text([256, *"a<think>é".encode(), 257], BYTES) == text


def test_a_vocabulary_without_a_beginning_leaves_it_out(foreign_tokenizer):
    ids = encode_text(f"{BOS}a{EOS}", foreign_tokenizer)
    assert ids == [*foreign_tokenizer.encode("a"), 0]
    assert decode_text(ids, foreign_tokenizer) == f"a{EOS}"


@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_the_ids_are_those_of_the_whole_text(any_tokenizer, mode):
    tokenized = encode_to_tokens(CONVERSATION, any_tokenizer, thinking_mode=mode)
    text = encode_messages(CONVERSATION, thinking_mode=mode)

    assert tokenized.ids.dtype == np.int32
    assert tokenized.ids.shape == tokenized.trainable.shape
    assert tokenized.ids.tolist() == encode_text(text, any_tokenizer)


def test_options_reach_the_text(any_tokenizer):
    options = {
        "thinking_mode": "thinking",
        "context": [user("a")],
        "add_bos": False,
        "drop_thinking": False,
        "tools_block": "T{tool_schemas}",
        "response_format_block": "F{schema}",
    }
    system = {"role": "system", "tools": [{"function": 1}], "response_format": {"type": "object"}}
    messages = [system, {"role": "developer", "content": "d"}, assistant("", "r"), user("b")]
    tokenized = encode_to_tokens(messages, any_tokenizer, **options)
    assert tokenized.ids.tolist() == encode_text(
        '\n\nT1\n\nF{"type": "object"}<｜User｜>\n\n# The user\'s message is: d<｜Assistant｜></think>'
        f"{EOS}<｜User｜>b<｜Assistant｜><think>",
        any_tokenizer,
    )


def test_what_the_model_wrote_trains_and_what_the_prompt_emits_does_not(any_tokenizer):
    tokenized = encode_to_tokens(CONVERSATION, any_tokenizer, thinking_mode="thinking")
    calls = (
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="q" string="true">明天</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    )
    assert produced(tokenized, any_tokenizer) == [
        f"Hi!{EOS}",
        f"first</think>Let me look.{calls}{EOS}",
        f"second</think>Cloudy.{EOS}",
    ]


def test_in_chat_mode_the_closing_think_tag_belongs_to_the_prompt(any_tokenizer):
    tokenized = encode_to_tokens(
        [user("a"), assistant("b", "r")], any_tokenizer, thinking_mode="chat"
    )
    assert produced(tokenized, any_tokenizer) == [f"b{EOS}"]


def test_a_prompt_has_nothing_that_trains(any_tokenizer):
    for messages in ([user("a")], []):
        tokenized = encode_to_tokens(messages, any_tokenizer, thinking_mode="thinking")
        assert not tokenized.trainable.any()
        assert tokenized.trainable.dtype == np.bool_


def test_a_turn_without_a_prompt_before_it_is_tokenised_by_itself(official_tokenizer):
    messages = [{"role": "system", "content": "The wea"}, assistant("ther", "r")]
    tokenized = encode_to_tokens(messages, official_tokenizer, thinking_mode="thinking")
    assert tokenized.ids.tolist() == [
        *official_tokenizer.encode(f"{BOS}The wea"),
        *official_tokenizer.encode(f"r</think>ther{EOS}"),
    ]


@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_prompt_sampled_turn_and_results_are_the_next_prompt(any_tokenizer, mode):
    def ids_of(messages):
        return encode_to_tokens(messages, any_tokenizer, thinking_mode=mode).ids.tolist()

    prompt = ids_of(CONVERSATION[:4])
    sampled = ids_of(CONVERSATION[:5])[len(prompt) :]
    new = append_turn(
        CONVERSATION[5:7], any_tokenizer, thinking_mode=mode, sampled_ids=sampled, n_calls=2
    )

    assert new.dtype == np.int32
    assert [*prompt, *sampled, *new.tolist()] == ids_of(CONVERSATION[:7])
    assert parse_completion(decode_text(sampled, any_tokenizer), thinking_mode=mode) == (
        STEP if mode == "thinking" else STEP | {"reasoning_content": ""}
    )


def test_a_user_follows_in_chat_mode(any_tokenizer):
    before = [user("a"), assistant("b")]
    after = [{"role": "system", "content": "note"}, user("c")]
    whole = encode_to_tokens([*before, *after], any_tokenizer, thinking_mode="chat").ids
    start = encode_to_tokens(before, any_tokenizer, thinking_mode="chat").ids

    new = append_turn(after, any_tokenizer, thinking_mode="chat", sampled_ids=start)

    assert np.concatenate([start, new]).tolist() == whole.tolist()


@pytest.mark.parametrize("cut", [0, -1])
def test_a_turn_that_was_cut_gets_its_end_first(any_tokenizer, cut):
    eos = SpecialTokens.from_tokenizer(any_tokenizer).eos
    whole = [*any_tokenizer.encode("b"), eos]
    options = {"thinking_mode": "chat"}
    after_whole = append_turn([user("c")], any_tokenizer, sampled_ids=whole, **options)
    after_cut = append_turn([user("c")], any_tokenizer, sampled_ids=whole[:cut], **options)
    assert after_cut.tolist() == [eos, *after_whole.tolist()]


def test_a_call_that_could_not_be_read_can_be_answered(official_tokenizer):
    new = append_turn(
        [result("cannot be read")],
        official_tokenizer,
        thinking_mode="thinking",
        sampled_ids=[1],
        n_calls=1,
    )
    assert official_tokenizer.decode(new.tolist()) == (
        "\n\n<function_results>\n<result>cannot be read</result>\n</function_results>\n\n<think>"
    )


@pytest.mark.parametrize("role", ["user", "developer"])
def test_a_new_question_in_thinking_mode_asks_for_a_new_prompt(role):
    with pytest.raises(EncodingError, match="make the prompt anew with encode_to_tokens"):
        append_turn(
            [result("r"), {"role": role, "content": "c"}],
            BYTES,
            thinking_mode="thinking",
            sampled_ids=[257],
            n_calls=1,
        )


@pytest.mark.parametrize(
    ("messages", "n_calls", "words"),
    [
        ([result("a")], 2, "n_calls=2 tool messages must come first"),
        ([result("a"), result("b")], 1, "n_calls=1 tool messages must come first"),
        ([user("u"), result("a")], 1, "n_calls=1 tool messages must come first"),
        ([assistant("a")], 0, "only tool, system, user and developer can follow"),
        ([{"role": "robot"}], 0, "only tool, system, user and developer can follow"),
        ([], 0, "the last message must be one that is answered"),
        ([{"role": "system", "content": "s"}], 0, "the last message must be one that is answered"),
        ([user(["part"])], 0, r"new message 0 \(user\): content must be a string"),
    ],
)
def test_what_can_not_follow_a_turn_is_an_error(messages, n_calls, words):
    with pytest.raises(EncodingError, match=words):
        append_turn(messages, BYTES, thinking_mode="chat", sampled_ids=[257], n_calls=n_calls)


def test_an_unknown_mode_is_an_error():
    with pytest.raises(EncodingError, match="must be one of chat, thinking"):
        append_turn([user("c")], BYTES, thinking_mode="", sampled_ids=[257])
    with pytest.raises(EncodingError, match="must be one of chat, thinking"):
        encode_to_tokens([user("c")], BYTES, thinking_mode="")
