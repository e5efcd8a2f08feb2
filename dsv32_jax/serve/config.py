"""How requests are answered."""

from dataclasses import dataclass

from dsv32_jax.config import require

NO_LIMIT = 2**31 - 1  # tokens; what an int32 holds


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How requests are answered.

    Attributes:
        model: The name that clients call the model by.
        api_key: What clients must know; None lets everybody in.
        thinking: Whether the model reasons first where a request does not say.
        timeout: Seconds that a request may take, above 0.
        max_body: Bytes that a request may have.
        max_prompt: Tokens that a prompt may have; the engine's own limit holds too.
        tools_block: Wording around tools; None is this project's.
        response_format_block: Wording around a response format; None is this project's.
    """

    model: str
    api_key: str | None = None
    thinking: bool = False
    timeout: float = 600.0
    max_body: int = 2**24
    max_prompt: int = NO_LIMIT
    tools_block: str | None = None
    response_format_block: str | None = None

    def __post_init__(self) -> None:
        """Check the time."""
        require(self.timeout > 0, f"timeout={self.timeout:g} must be above 0")
