import pytest

from dsv32_jax.generate.protocol import FinishEvent, TokenEvent
from dsv32_jax.serve.answers import TextAnswer
from dsv32_jax.tokenizer import ByteTokenizer

CANCELLED = FinishEvent(0, "cancelled", None)


@pytest.fixture
def answer():
    return TextAnswer(ByteTokenizer(), ends=frozenset(), stop=["b"], keeps_tokens=False)


def test_a_text_is_cancelled_only_once_a_stop_string_has_ended_it(answer):
    answer.take(TokenEvent(0, ord("a"), 0.0, None))
    with pytest.raises(AssertionError, match="still read"):
        answer.take(CANCELLED)
    answer.take(TokenEvent(0, ord("b"), 0.0, None))
    assert answer.take(CANCELLED) == []
    assert (answer.text, answer.finish_reason) == ("a", "stop")
