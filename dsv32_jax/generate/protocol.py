"""What an engine is told and what it reports."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Int, Integer

from dsv32_jax.cache import CacheConfig
from dsv32_jax.config import require
from dsv32_jax.mla import DecodeMode

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How generation is run.

    Attributes:
        n_slots: Sequences that are decoded at once.
        max_len: Longest sequence, prompt and generated tokens together.
        prefill_chunk: Tokens of a prompt that are run at once, at most `max_len`; between two pieces the others are
            decoded.
        max_waiting: Requests that may wait for a slot.
        cache: Size and format of the cache.
        mode: "sparse" is the model; "dense" reads every earlier token.
        speculative: Let the MTP module draft tokens.
        reuse_prefixes: Keep the rows of finished sequences for prompts that begin alike.
        keep_sets: Report the tokens that each token was drawn from.
    """

    n_slots: int = 8
    max_len: int = 4096
    prefill_chunk: int = 256
    max_waiting: int = 256
    cache: CacheConfig = CacheConfig()
    mode: DecodeMode = "sparse"
    speculative: bool = False
    reuse_prefixes: bool = True
    keep_sets: bool = False

    def __post_init__(self) -> None:
        """Check sizes."""
        for name in ("n_slots", "prefill_chunk", "max_waiting"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        require(self.max_len >= 2, f"max_len={self.max_len} must be at least 2")
        require(self.mode in get_args(DecodeMode), f"mode={self.mode!r} must be sparse or dense")
        require(
            self.mode == "sparse" or not self.cache.keep_selection,
            "cache.keep_selection=True needs mode='sparse': a dense one selects nothing",
        )
        n_rows = self.cache.n_pages * self.cache.page_size
        require(
            n_rows < 2**31,
            f"n_pages={self.cache.n_pages} of {self.cache.page_size} tokens are more than int32 can count",
        )
        require(
            n_rows >= self.max_len,
            f"n_pages={self.cache.n_pages} of {self.cache.page_size} tokens hold {n_rows}, fewer than "
            f"max_len={self.max_len}",
        )


class QueueFullError(RuntimeError):
    """Too many requests wait already; try again later."""


class TokenEvent(NamedTuple):
    """A token was drawn.

    Attributes:
        request: The request's number.
        token: Its id.
        log_p: Its log-probability under the distribution it was drawn from.
        kept: int32, ascending: the tokens of that distribution; None unless `keep_sets`.
    """

    request: int
    token: int
    log_p: float
    kept: Int[np.ndarray, " W"] | None


class FinishEvent(NamedTuple):
    """A request is done.

    Attributes:
        request: Its number.
        reason: "stop" after an end token, "length" at a limit, "cancelled".
        experts: [L, T, A] experts of every token of the prompt and the text in each expert layer, -1 for those that
            no step has run: the last one, or more of a cancelled request; None unless the cache keeps them.
        selection: [L, T, K] positions of the keys that the same tokens selected in each layer, ascending, then -1; None
            unless the cache keeps them.
    """

    request: int
    reason: FinishReason
    experts: Integer[np.ndarray, "L T A"] | None
    selection: Integer[np.ndarray, "L T K"] | None = None


Event = TokenEvent | FinishEvent


@dataclass
class Stats:
    """Counts since the engine began.

    Attributes:
        prompt_tokens: Tokens of prompts that were run.
        reused_tokens: Tokens that were found in the cache, also by sequences that had lost their pages.
        drawn_tokens: Tokens drawn.
        drafts: Drafts checked.
        accepted: Drafts taken.
        preempted: Times a sequence lost its pages and started over.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    drawn_tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    preempted: int = 0

    @property
    def acceptance(self) -> float:
        """Share of the checked drafts that were taken; NaN before the first."""
        return self.accepted / self.drafts if self.drafts else float("nan")
