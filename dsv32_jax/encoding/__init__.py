"""Messages to text and tokens and back, in DeepSeek-V3.2's official format."""

from dsv32_jax.encoding.blocks import read_response_format_block, read_tools_block
from dsv32_jax.encoding.errors import EncodingError
from dsv32_jax.encoding.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    Finished,
    Problem,
    ReasoningDelta,
)
from dsv32_jax.encoding.messages import Message, encode_messages
from dsv32_jax.encoding.parser import (
    StreamingParser,
    parse_completion,
    parse_completion_tolerant,
)
from dsv32_jax.encoding.tokens import (
    SpecialTokens,
    TokenizedMessages,
    append_turn,
    decode_text,
    encode_text,
    encode_to_tokens,
)

__all__ = [
    "ArgumentsDelta",
    "CallEnd",
    "CallStart",
    "ContentDelta",
    "EncodingError",
    "Event",
    "Finished",
    "Message",
    "Problem",
    "ReasoningDelta",
    "SpecialTokens",
    "StreamingParser",
    "TokenizedMessages",
    "append_turn",
    "decode_text",
    "encode_messages",
    "encode_text",
    "encode_to_tokens",
    "parse_completion",
    "parse_completion_tolerant",
    "read_response_format_block",
    "read_tools_block",
]
