"""The compiled steps: a piece of a prompt, one token for every sequence, and drafts checked two tokens at a time."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from dsv32_jax import compiling
from dsv32_jax.cache import View
from dsv32_jax.config import ModelConfig
from dsv32_jax.generate import decoder as decoders
from dsv32_jax.generate import sampling
from dsv32_jax.generate.decoder import Cache, Decoder
from dsv32_jax.generate.sampling import Knobs
from dsv32_jax.mla import DecodeMode


class Static(NamedTuple):
    """What the steps are compiled for.

    Attributes:
        cfg: The model.
        page_size: Tokens of a page.
        mode: "sparse" or "dense".
        keep_sets: Return the kept sets.
    """

    cfg: ModelConfig
    page_size: int
    mode: DecodeMode
    keep_sets: bool


class Draft(NamedTuple):
    """The MTP module's guess at each sequence's token after the next.

    Attributes:
        token: int32 [B].
        log_q: float32 [B, V], what it was drawn from.
    """

    token: Int[Array, " B"]
    log_q: Float[Array, "B V"]


class Drawn(NamedTuple):
    """Tokens of each sequence, n of M places filled.

    Attributes:
        token: int32 [B, M].
        log_p: float32 [B, M], under the distribution it was drawn from.
        kept: uint8 [B, M, V / 8], that distribution's tokens as bits, or None.
        n: int32 [B], tokens drawn.
    """

    token: Int[Array, "B M"]
    log_p: Float[Array, "B M"]
    kept: UInt[Array, "B M W"] | None
    n: Int[Array, " B"]


def empty_draft(n_slots: int, vocab_size: int) -> Draft:
    """Return a draft of token 0, from the distribution that has nothing else."""
    log_q = jnp.full((n_slots, vocab_size), -jnp.inf).at[:, 0].set(0.0)
    return Draft(jnp.zeros(n_slots, jnp.int32), log_q)


def _drawn(static: Static, tokens: list[Array], log_ps: list[Array], n: Array) -> Drawn:
    log_p = [sampling.chosen(log_p, token) for log_p, token in zip(log_ps, tokens, strict=True)]
    kept = [sampling.pack_kept(log_p) for log_p in log_ps] if static.keep_sets else None
    return Drawn(
        jnp.stack(tokens, 1), jnp.stack(log_p, 1), None if kept is None else jnp.stack(kept, 1), n
    )


def prefill(
    static: Static,
    decoder: Decoder,
    cache: Cache,
    draft: Draft | None,
    slot: Int[Array, ""],
    tokens_BT: Int[Array, "1 T"],
    next_BT: Int[Array, "1 T"],
    position_BT: Int[Array, "1 T"],
    table_BP: Int[Array, "1 P"],
    knobs: Knobs,
    is_last: Bool[Array, ""],
) -> tuple[Cache, Draft | None, Drawn]:
    """Add a piece of one sequence to the cache; draw its first token if the piece is the prompt's last.

    Args:
        static: What to compile for.
        decoder: The model.
        cache: The cache; donated.
        draft: The drafts of all slots, or None to run without MTP; donated.
        slot: The sequence's slot.
        tokens_BT: The piece, padded.
        next_BT: Each token's successor; that of the prompt's last token is drawn here.
        position_BT: Their positions, -1 for padding.
        table_BP: The sequence's pages.
        knobs: Its settings.
        is_last: Whether the piece ends the prompt; else what is drawn means nothing.

    Returns:
        (cache, drafts, the drawn token).
    """
    cfg, mode = static.cfg, static.mode
    view = View(position_BT, table_BP, static.page_size)
    hidden, cache = decoders.extend(decoder, cfg, cache, tokens_BT, view, mode)
    last_B = jnp.argmax(position_BT, axis=1)
    where_B = jnp.max(position_BT, axis=1) + 1  # of the token that is drawn
    log_p = sampling.log_probs(decoders.logits(decoder, _pick(hidden, last_B)), knobs)
    token_B = sampling.draw(log_p, sampling.keys(knobs.seed, where_B, sampling.DRAW))
    drawn = _drawn(static, [token_B], [log_p], jnp.ones_like(token_B))
    if draft is not None:
        is_end = jnp.arange(tokens_BT.shape[1]) == last_B[:, None]
        next_BT = jnp.where(is_end & is_last, token_B[:, None], next_BT)
        mtp_hidden, cache = decoders.extend_mtp(decoder, cfg, cache, hidden, next_BT, view, mode)
        mine = _guess(decoder, _pick(mtp_hidden, last_B), knobs, where_B + 1)
        draft = jax.tree.map(lambda all_, one: all_.at[slot].set(one[0]), draft, mine)
    return cache, draft, drawn


def decode(
    static: Static,
    decoder: Decoder,
    cache: Cache,
    token_B: Int[Array, " B"],
    position_B: Int[Array, " B"],
    table_BP: Int[Array, "B P"],
    knobs: Knobs,
) -> tuple[Cache, Drawn]:
    """Add each sequence's last token to the cache and draw its next one.

    Args:
        static: What to compile for.
        decoder: The model.
        cache: The cache; donated.
        token_B: The last tokens.
        position_B: Their positions; -1 where the slot is idle.
        table_BP: The sequences' pages.
        knobs: Their settings.

    Returns:
        (cache, the drawn tokens).
    """
    view = View(position_B[:, None], table_BP, static.page_size)
    hidden, cache = decoders.extend(decoder, static.cfg, cache, token_B[:, None], view, static.mode)
    log_p = sampling.log_probs(decoders.logits(decoder, hidden[:, 0]), knobs)
    drawn_B = sampling.draw(log_p, sampling.keys(knobs.seed, position_B + 1, sampling.DRAW))
    return cache, _drawn(static, [drawn_B], [log_p], jnp.ones_like(drawn_B))


def speculate(
    static: Static,
    decoder: Decoder,
    cache: Cache,
    draft: Draft,
    token_B: Int[Array, " B"],
    position_B: Int[Array, " B"],
    uses_draft_B: Bool[Array, " B"],
    table_BP: Int[Array, "B P"],
    knobs: Knobs,
) -> tuple[Cache, Draft, Drawn]:
    """Draw one or two tokens a sequence: the draft is checked, and where it holds the token after it is drawn too.

    With p what the model draws from and q what the draft x was drawn from, x is taken with probability
    min(1, p(x) / q(x)), else a token is drawn from max(p - q, 0): the tokens are distributed as without drafts.

    Args:
        static: What to compile for.
        decoder: A model with MTP.
        cache: The cache; donated.
        draft: The drafts; donated.
        token_B: The last tokens.
        position_B: Their positions; -1 where the slot is idle.
        uses_draft_B: Whether the sequence has room for two tokens.
        table_BP: The sequences' pages, which reach one position beyond `position_B` where the draft is used.
        knobs: Their settings.

    Returns:
        (cache, new drafts, the drawn tokens).

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1; DeepSeek-V3 report, section 5.4.3.
    """
    cfg, mode = static.cfg, static.mode
    uses_draft_B &= position_B >= 0
    second_B = jnp.where(uses_draft_B, position_B + 1, -1)
    view = View(jnp.stack([position_B, second_B], 1), table_BP, static.page_size)
    tokens_BT = jnp.stack([token_B, draft.token], 1)
    hidden, cache = decoders.extend(decoder, cfg, cache, tokens_BT, view, mode)
    logits_BTV = decoders.logits(decoder, hidden)
    log_p, log_p_after = (sampling.log_probs(logits_BTV[:, i], knobs) for i in range(2))
    first_B, accepted_B = _check(log_p, draft, uses_draft_B, knobs, position_B + 1)
    after_keys = sampling.keys(knobs.seed, position_B + 2, sampling.DRAW)
    after_B = sampling.draw(log_p_after, after_keys)
    n_B = 1 + accepted_B.astype(jnp.int32)
    drawn = _drawn(static, [first_B, after_B], [log_p, log_p_after], n_B)
    known = jnp.where(accepted_B, second_B, -1)
    view = view._replace(position=jnp.stack([position_B, known], 1))
    mtp_hidden, cache = decoders.extend_mtp(decoder, cfg, cache, hidden, drawn.token, view, mode)
    guess = _guess(decoder, _pick(mtp_hidden, n_B - 1), knobs, position_B + n_B + 1)
    return cache, guess, drawn


class Steps(NamedTuple):
    """The three steps, compiled where they are first called with a shape."""

    prefill: Callable[..., Any]
    decode: Callable[..., Any]
    speculate: Callable[..., Any]


@functools.cache
def compiled() -> Steps:
    """Return the steps under jit, with the cache and the drafts donated."""

    def jit(step: Callable[..., Any], *donated: str) -> Callable[..., Any]:
        options = compiling.compiler_options()
        return jax.jit(
            step, static_argnames="static", donate_argnames=donated, compiler_options=options
        )

    return Steps(
        jit(prefill, "cache", "draft"), jit(decode, "cache"), jit(speculate, "cache", "draft")
    )


def _check(
    log_p_BV: Array, draft: Draft, uses_draft_B: Array, knobs: Knobs, position_B: Array
) -> tuple[Array, Array]:
    """Return the token at a position, and whether it is the draft."""
    log_ratio_B = sampling.chosen(log_p_BV, draft.token) - sampling.chosen(draft.log_q, draft.token)
    chance_B = sampling.uniform(sampling.keys(knobs.seed, position_B, sampling.ACCEPT))
    accepted_B = uses_draft_B & (jnp.log(chance_B) < log_ratio_B)
    rest_BV = jnp.maximum(jnp.exp(log_p_BV) - jnp.exp(draft.log_q), 0.0)
    # Nothing is left over only where p = q to rounding; p itself is then the right thing to draw from.
    is_empty_B1 = jnp.sum(rest_BV, axis=-1, keepdims=True) <= 0
    from_BV = jnp.where(is_empty_B1 | ~uses_draft_B[:, None], log_p_BV, jnp.log(rest_BV))
    drawn_B = sampling.draw(from_BV, sampling.keys(knobs.seed, position_B, sampling.DRAW))
    return jnp.where(accepted_B, draft.token, drawn_B), accepted_B


def _guess(decoder: Decoder, hidden_BD: Array, knobs: Knobs, position_B: Array) -> Draft:
    """Draw the token at a position from the MTP module's state, with the same settings."""
    log_q = sampling.log_probs(decoders.logits(decoder, hidden_BD), knobs)
    token_B = sampling.draw(log_q, sampling.keys(knobs.seed, position_B, sampling.DRAFT))
    return Draft(token_B, log_q)


def _pick(hidden_BTD: Array, place_B: Array) -> Array:
    return jnp.take_along_axis(hidden_BTD, place_B[:, None, None], axis=1)[:, 0]
