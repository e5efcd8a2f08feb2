"""Messages to text and back, in DeepSeek-V3.2's official format."""

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
    "StreamingParser",
    "encode_messages",
    "parse_completion",
    "parse_completion_tolerant",
    "read_response_format_block",
    "read_tools_block",
]
