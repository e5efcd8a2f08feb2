"""A request in the engine: its tokens, its pages, and how far it has come."""

from dataclasses import dataclass, field

from dsv32_jax.generate.pages import ROOT
from dsv32_jax.generate.sampling import SamplingParams


@dataclass(eq=False)  # two requests are never the same
class Request:
    """A request and how far it has come. Rows of the cache exist for the first `n_cached` tokens."""

    number: int
    tokens: list[int]
    n_prompt: int
    params: SamplingParams
    ends: frozenset[int]
    slot: int = -1
    n_cached: int = 0
    pages: list[int] = field(default_factory=list)
    named: int = 0  # pages that can be found
    last_name: bytes = ROOT

    @property
    def n_drawn(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_prefill(self) -> int:
        """Tokens whose rows the prefill makes: all of a prompt; of one that lost its pages all but the last drawn."""
        return len(self.tokens) - (self.n_drawn > 0)

    @property
    def is_prefilling(self) -> bool:
        """Whether some of them are still to be made."""
        return self.n_cached < self.n_prefill
