"""Sampling: the distribution a token is drawn from, and the draw, repeatable by seed and position."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from dsv32_jax.config import require

MAX_SEED = 2**32 - 1
# What a random number is for; each use has a stream of its own.
DRAW, DRAFT, ACCEPT = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are drawn.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Keep the smallest set of most likely tokens with at least this probability; 1 keeps all.
        top_k: Keep this many of the most likely tokens; 0 keeps all. Applied before `top_p`.
        seed: Of the draws: the same seed, prompt and engine settings give the same tokens.
        max_tokens: Tokens to generate at most.
        stop_ids: Ids that end the text besides the tokenizer's eos.
        ignore_eos: Go on past the eos.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        # A tiny temperature overflows the quotient; 0 says what it would mean.
        require(
            self.temperature == 0 or 1e-3 <= self.temperature <= 1e3,
            f"temperature={self.temperature} must be 0 or in [0.001, 1000]",
        )
        require(0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]")
        require(0 <= self.top_k < 2**31, f"top_k={self.top_k} must be in [0, {2**31 - 1}]")
        require(0 <= self.seed <= MAX_SEED, f"seed={self.seed} must be in [0, {MAX_SEED}]")
        require(self.max_tokens >= 1, f"max_tokens={self.max_tokens} must be at least 1")


class Knobs(NamedTuple):
    """The settings of each sequence of a batch.

    Attributes:
        temperature: float32 [B].
        top_p: float32 [B].
        top_k: int32 [B].
        seed: uint32 [B].
    """

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    seed: UInt[Array, " B"]


def log_probs(logits_BV: Float[Array, "B V"], knobs: Knobs) -> Float[Array, "B V"]:
    """Return the log-probabilities that tokens are drawn with.

    `log softmax(logits / temperature)` over the kept tokens, -inf for the others. Kept are the `top_k` most likely
    tokens, of them the smallest leading set whose probability reaches `top_p`, at least one; ties go to the smaller
    id. Temperature 0 keeps the most likely token alone.

    Args:
        logits_BV: float32 logits.
        knobs: The settings.

    Returns:
        float32; each row's exponentials sum to 1.
    """
    n_vocab = logits_BV.shape[1]
    greedy_B = knobs.temperature == 0
    scaled_BV = logits_BV / jnp.where(greedy_B, 1.0, knobs.temperature)[:, None]
    # Greedy is the top 1, so that one rule covers both.
    top_k_B = jnp.where(greedy_B, 1, jnp.where(knobs.top_k == 0, n_vocab, knobs.top_k))
    filters = jnp.any((top_k_B < n_vocab) | (knobs.top_p < 1))
    kept_BV = jax.lax.cond(
        filters,
        lambda: _kept(scaled_BV, top_k_B, knobs.top_p),
        lambda: jnp.ones(scaled_BV.shape, bool),
    )
    return jax.nn.log_softmax(jnp.where(kept_BV, scaled_BV, -jnp.inf), axis=-1)


def _kept(scaled_BV: Array, top_k_B: Array, top_p_B: Array) -> Array:
    """Mark the tokens that pass both filters."""
    order_BV = jnp.argsort(scaled_BV, axis=-1, descending=True, stable=True)
    sorted_BV = jnp.take_along_axis(scaled_BV, order_BV, axis=-1)
    within_BV = jnp.arange(scaled_BV.shape[1]) < top_k_B[:, None]
    p_BV = jax.nn.softmax(jnp.where(within_BV, sorted_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    # p = 1 keeps all, though the sum may round to 1 before the last; a p that is 0 in float32 keeps the first.
    kept_BV = within_BV & ((before_BV < top_p_B[:, None]) | (top_p_B == 1)[:, None])
    kept_BV = kept_BV.at[:, 0].set(True)
    rows = jnp.arange(scaled_BV.shape[0])[:, None]
    return jnp.zeros(scaled_BV.shape, bool).at[rows, order_BV].set(kept_BV)


def keys(seed_B: UInt[Array, " B"], position_B: Int[Array, " B"], use: int) -> Array:
    """Return a random key a sequence, by its seed, a token's position and what the number is for.

    So a draw depends on nothing else: not on the slot, the batch, or how often the sequence was interrupted.

    Args:
        seed_B: Seeds.
        position_B: Position of the token that is drawn.
        use: DRAW, DRAFT or ACCEPT.

    Returns:
        Keys [B].
    """

    def one(seed: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), use)

    return jax.vmap(one)(seed_B, position_B)


def draw(log_p_BV: Float[Array, "B V"], keys_B: Array) -> Int[Array, " B"]:
    """Draw a token from each row by the Gumbel-max trick.

    Args:
        log_p_BV: Log-probabilities, not necessarily normalised; -inf is never drawn.
        keys_B: A key a row.

    Returns:
        int32 ids.
    """
    n_vocab = log_p_BV.shape[1]
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, (n_vocab,), jnp.float32))(keys_B)
    return jnp.argmax(log_p_BV + noise_BV, axis=-1).astype(jnp.int32)


def uniform(keys_B: Array) -> Float[Array, " B"]:
    """Return a number in [0, 1) a key."""
    return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys_B)


def chosen(log_p_BV: Float[Array, "B V"], token_B: Int[Array, " B"]) -> Float[Array, " B"]:
    """Return the log-probability of a token of each row."""
    return jnp.take_along_axis(log_p_BV, token_B[:, None], axis=1)[:, 0]


def pack_kept(log_p_BV: Float[Array, "B V"]) -> UInt[Array, "B W"]:
    """Return the kept sets as bits, eight tokens a byte, the first in the highest bit."""
    return jnp.packbits(log_p_BV > -jnp.inf, axis=-1)
