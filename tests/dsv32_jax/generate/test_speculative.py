"""Drafts change how fast tokens come, not which, and not how they are distributed."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax.cache import CacheConfig
from dsv32_jax.generate import sampling, steps
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig, TokenEvent
from dsv32_jax.generate.sampling import Knobs, SamplingParams

CFG = EngineConfig(
    n_slots=3,
    max_len=48,
    prefill_chunk=10,
    cache=CacheConfig(n_pages=40, page_size=4),
    speculative=True,
    reuse_prefixes=False,
)


def complete(engine, requests):
    numbers = [engine.submit(*request) for request in requests]
    tokens, log_p = ({n: [] for n in numbers} for _ in range(2))
    for event in engine.run():
        if isinstance(event, TokenEvent):
            tokens[event.request].append(event.token)
            log_p[event.request].append(event.log_p)
    return [tokens[n] for n in numbers], [log_p[n] for n in numbers]


@pytest.fixture(scope="module")
def cfg(cfg):
    """So few tokens that even a random MTP module is often right."""
    return dataclasses.replace(cfg, vocab_size=3)


@pytest.fixture(scope="module")
def model(cfg, new_model):
    return new_model(cfg)


@pytest.fixture(scope="module")
def prompts(cfg):
    rng = np.random.default_rng(3)
    return [rng.integers(0, cfg.vocab_size, size=n).tolist() for n in (3, 17, 1, 24)]


def test_greedy_tokens_are_those_without_drafts(model, prompts):
    requests = [(p, SamplingParams(max_tokens=9, temperature=0.0)) for p in prompts]
    plain = Engine(model, dataclasses.replace(CFG, speculative=False))
    drafting = Engine(model, CFG)
    assert complete(drafting, requests)[0] == complete(plain, requests)[0]
    assert drafting.stats.drafts > 0


def test_the_same_request_gives_the_same_tokens_whatever_else_is_in_the_batch(model, prompts):
    requests = [(p, SamplingParams(max_tokens=16, seed=i)) for i, p in enumerate(prompts)]
    alone = [complete(Engine(model, CFG), [request])[0][0] for request in requests]
    together = Engine(model, CFG)
    assert complete(together, requests)[0] == alone
    small = Engine(model, dataclasses.replace(CFG, cache=CacheConfig(n_pages=12, page_size=4)))
    assert complete(small, requests)[0] == alone
    assert small.stats.preempted > 0
    sharing = Engine(model, dataclasses.replace(CFG, reuse_prefixes=True))
    for _ in range(2):
        assert complete(sharing, requests)[0] == alone
    assert sharing.stats.reused_tokens > 0


def test_texts_are_distributed_as_the_model_says(model, prompts):
    """512 texts of three tokens: their frequencies are the products of the model's probabilities."""
    prompt, n, places = prompts[0], 512, 3
    cfg = dataclasses.replace(
        CFG, n_slots=64, max_waiting=n, cache=CacheConfig(n_pages=800, page_size=4)
    )
    engine = Engine(model, cfg)
    params = SamplingParams(max_tokens=places, temperature=2.0)
    tokens, log_p = complete(
        engine, [(prompt, dataclasses.replace(params, seed=i)) for i in range(n)]
    )
    assert 0 < engine.stats.accepted < engine.stats.drafts
    counts = collections.Counter(map(tuple, tokens))
    texts = sorted(counts)
    expected = _probabilities(model, prompt, texts)
    for text, p in zip(texts, expected, strict=True):
        assert abs(counts[text] / n - p) < 4.5 * np.sqrt(p * (1 - p) / n), (text, p)
    assert sum(expected) > 0.99  # what was never drawn is hardly likely
    reported = {tuple(t): sum(lp) for t, lp in zip(tokens, log_p, strict=True)}
    np.testing.assert_allclose([reported[t] for t in texts], np.log(expected), atol=1e-4)


def _probabilities(model, prompt, texts):
    """Of each text, by one pass over each at temperature 2."""
    rows = jnp.asarray([[*prompt, *text] for text in texts], jnp.int32)
    logits = np.asarray(jax.jit(lambda m: m.logits(m(rows).hidden))(model), np.float64)
    out = []
    for text, row in zip(texts, logits[:, len(prompt) - 1 :], strict=True):
        p = 1.0
        for place, token in enumerate(text):
            p *= np.exp(row[place, token] / 2) / np.exp(row[place] / 2).sum()
        out.append(p)
    return out


def test_a_checked_draft_has_the_models_distribution():
    n, n_vocab = 40000, 5
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(n_vocab)) for _ in range(2))
    p[1], q[2] = 0, 0  # a draft that can not stand, and a token that is never drafted
    p, q = p / p.sum(), q / q.sum()
    with np.errstate(divide="ignore"):
        log_p, log_q = (
            jnp.broadcast_to(jnp.asarray(np.log(x), jnp.float32), (n, n_vocab)) for x in (p, q)
        )
    seed = jnp.arange(n, dtype=jnp.uint32)
    knobs = Knobs(jnp.ones(n), jnp.ones(n), jnp.zeros(n, jnp.int32), seed)
    place = jnp.full(n, 7)
    guess = sampling.draw(log_q, sampling.keys(seed, place, sampling.DRAFT))
    draft = steps.Draft(guess, log_q)

    token, accepted = steps._check(log_p, draft, jnp.ones(n, bool), knobs, place)

    shares = np.bincount(token, minlength=n_vocab) / n
    assert np.abs(shares - p).max() < 4.5 * np.sqrt(0.25 / n)
    # The largest share any scheme can accept is the overlap of p and q.
    overlap = np.minimum(p, q).sum()
    assert np.asarray(accepted).mean() == pytest.approx(overlap, abs=4.5 * np.sqrt(0.25 / n))
    token, accepted = steps._check(log_p, draft, jnp.zeros(n, bool), knobs, place)
    assert not np.asarray(accepted).any()
    assert np.abs(np.bincount(token, minlength=n_vocab) / n - p).max() < 4.5 * np.sqrt(0.25 / n)


def test_equal_distributions_always_accept():
    log_p = jnp.log(jnp.asarray([[0.2, 0.8]] * 100))
    draft = steps.Draft(jnp.asarray([0, 1] * 50), log_p)
    knobs = Knobs(
        jnp.ones(100), jnp.ones(100), jnp.zeros(100, jnp.int32), jnp.arange(100, dtype=jnp.uint32)
    )
    token, accepted = steps._check(
        log_p, draft, jnp.ones(100, bool), knobs, jnp.zeros(100, jnp.int32)
    )
    assert np.asarray(accepted).all()
    np.testing.assert_array_equal(token, draft.token)


def test_no_token_is_drawn_beyond_a_limit(model, prompts):
    for n_tokens in itertools.chain(range(1, 5), [100]):
        tokens = complete(Engine(model, CFG), [(prompts[1], SamplingParams(max_tokens=n_tokens))])[
            0
        ][0]
        assert len(tokens) == min(n_tokens, CFG.max_len - 17)


def test_drafts_need_the_module(new_model, cfg):
    with pytest.raises(ValueError, match="MTP"):
        Engine(new_model(dataclasses.replace(cfg, mtp=False)), CFG)
