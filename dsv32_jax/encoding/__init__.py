"""Messages to text, in DeepSeek-V3.2's official format."""

from dsv32_jax.encoding.blocks import read_response_format_block, read_tools_block
from dsv32_jax.encoding.errors import EncodingError
from dsv32_jax.encoding.messages import Message, encode_messages

__all__ = [
    "EncodingError",
    "Message",
    "encode_messages",
    "read_response_format_block",
    "read_tools_block",
]
