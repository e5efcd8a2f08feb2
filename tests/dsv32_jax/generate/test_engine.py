import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax.cache import CacheConfig
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig, FinishEvent, QueueFullError, TokenEvent
from dsv32_jax.generate.sampling import SamplingParams

CACHE = CacheConfig(n_pages=40, page_size=4)
CFG = EngineConfig(n_slots=3, max_len=48, prefill_chunk=10, cache=CACHE, reuse_prefixes=False)
TOL = 2e-5


def make(model, **changes):
    cache = dataclasses.replace(CACHE, **changes.pop("cache", {}))
    return Engine(model, dataclasses.replace(CFG, cache=cache, **changes))


def prompts_of(cfg, lengths, seed=3):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, cfg.vocab_size, size=n).tolist() for n in lengths]


def complete(engine, requests):
    """Run requests that are there from the start; return each one's tokens, log-probabilities and end."""
    numbers = [engine.submit(prompt, params) for prompt, params in requests]
    return gather(engine.run(), numbers)


def gather(events, numbers):
    tokens, log_p, ends = ({n: [] for n in numbers} for _ in range(3))
    for event in events:
        if isinstance(event, TokenEvent):
            tokens[event.request].append(event.token)
            log_p[event.request].append(event.log_p)
        else:
            ends[event.request] = event
    return [(tokens[n], log_p[n], ends[n]) for n in numbers]


@pytest.fixture(scope="module")
def requests(cfg):
    settings = [
        SamplingParams(max_tokens=9, seed=1),
        SamplingParams(max_tokens=6, seed=2, temperature=0.7, top_p=0.8),
        SamplingParams(max_tokens=11, seed=3, top_k=5),
        SamplingParams(max_tokens=4, temperature=0.0),
        SamplingParams(max_tokens=8, seed=1),
    ]
    return list(zip(prompts_of(cfg, [3, 17, 1, 24, 10]), settings, strict=True))


@pytest.fixture(scope="module")
def alone(model, requests):
    """Each request by itself."""
    return [complete(make(model), [request])[0] for request in requests]


def test_a_request_gives_the_same_tokens_whatever_else_is_in_the_batch(model, requests, alone):
    together = complete(make(model), requests)
    assert [t for t, _, _ in together] == [t for t, _, _ in alone]
    for (_, ours, _), (_, theirs, _) in zip(together, alone, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOL)
    backwards = complete(make(model), requests[::-1])[::-1]
    assert [t for t, _, _ in backwards] == [t for t, _, _ in alone]


def test_requests_that_join_late_get_the_same_tokens(model, requests, alone):
    engine, numbers, events = make(model), [], []
    for request in requests:
        numbers.append(engine.submit(*request))
        events += engine.step() + engine.step()
    found = gather([*events, *engine.run()], numbers)
    assert [t for t, _, _ in found] == [t for t, _, _ in alone]


def test_greedy_tokens_are_the_most_likely_ones_of_one_pass(model, requests, alone):
    prompt, (tokens, log_p, _) = requests[3][0], alone[3]
    text = jnp.asarray([prompt + tokens], jnp.int32)
    logits = jax.jit(lambda m: m.logits(m(text).hidden))(model)[0, len(prompt) - 1 : -1]
    assert tokens == np.argmax(logits, -1).tolist()
    assert log_p == [0.0] * len(tokens)


def test_reported_log_probabilities_are_those_of_one_pass(model, requests, alone):
    prompt, (tokens, log_p, _) = requests[0][0], alone[0]
    text = jnp.asarray([prompt + tokens], jnp.int32)
    logits = jax.jit(lambda m: m.logits(m(text).hidden))(model)[0, len(prompt) - 1 : -1]
    expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(log_p, expected, atol=TOL)


def test_a_cache_too_small_for_all_preempts_the_youngest_and_changes_no_token(
    model, requests, alone
):
    engine = make(model, cache={"n_pages": 12})
    found = complete(engine, requests)
    assert engine.stats.preempted > 0
    assert [t for t, _, _ in found] == [t for t, _, _ in alone]
    assert engine._pool.n_available == 12


def test_prompts_that_begin_alike_share_pages(model, cfg):
    begin = prompts_of(cfg, [21])[0]
    params = SamplingParams(max_tokens=5, temperature=0.0)
    apart = [complete(make(model), [([*begin, i], params)])[0][0] for i in range(3)]
    engine = make(model, reuse_prefixes=True)
    found = [complete(engine, [([*begin, i], params)])[0][0] for i in range(3)]
    assert found == apart
    # 22 tokens hold five full pages of four; the two later requests find them all.
    assert engine.stats.reused_tokens == 2 * 20
    together = complete(engine, [([*begin, i], params) for i in range(3)])
    assert [t for t, _, _ in together] == apart
    assert engine._pool.n_available == CACHE.n_pages


def test_a_conversation_goes_on_from_its_own_pages(model, cfg):
    params = SamplingParams(max_tokens=6, temperature=0.0)
    first = prompts_of(cfg, [9])[0]
    engine = make(model, reuse_prefixes=True)
    answer = complete(engine, [(first, params)])[0][0]
    again = first + answer + [5, 6]
    found = complete(engine, [(again, params)])[0][0]
    assert engine.stats.reused_tokens == 12  # 15 tokens, the last of which has no row: 3 pages of 4
    assert found == complete(make(model), [(again, params)])[0][0]


def test_an_end_token_stops_and_is_reported(model, requests, alone):
    prompt, params = requests[0]
    end = alone[0][0][4]
    first = alone[0][0].index(end)
    for engine, changed in (
        (Engine(model, CFG, eos_id=end), params),
        (make(model), dataclasses.replace(params, stop_ids=(end,))),
    ):
        tokens, _, finish = complete(engine, [(prompt, changed)])[0]
        assert tokens == alone[0][0][: first + 1]
        assert finish.reason == "stop"
    ignoring = dataclasses.replace(params, ignore_eos=True)
    tokens, _, finish = complete(Engine(model, CFG, eos_id=end), [(prompt, ignoring)])[0]
    assert tokens == alone[0][0]
    assert finish.reason == "length"


def test_a_sequence_ends_at_the_longest_length(model, cfg):
    prompt = prompts_of(cfg, [45])[0]
    tokens, _, finish = complete(make(model), [(prompt, SamplingParams(max_tokens=100))])[0]
    assert len(tokens) == 3
    assert finish.reason == "length"


def test_cancelling_frees_the_slot_at_the_next_step(model, requests):
    engine = make(model, n_slots=1)
    first, second = (engine.submit(*request) for request in requests[:2])
    engine.step()
    engine.cancel(first)
    engine.cancel(second)
    events = engine.step()
    assert [(e.request, e.reason) for e in events if isinstance(e, FinishEvent)] == [
        (first, "cancelled"),
        (second, "cancelled"),
    ]
    assert not engine.has_work
    assert engine._pool.n_available == CACHE.n_pages


def test_kept_sets_are_the_tokens_that_could_have_been_drawn(model, cfg):
    prompt = prompts_of(cfg, [7])[0]
    engine = make(model, keep_sets=True)
    engine.submit(prompt, SamplingParams(max_tokens=3, top_k=4))
    events = [event for event in engine.run() if isinstance(event, TokenEvent)]
    text = jnp.asarray([prompt + [event.token for event in events]], jnp.int32)
    logits = np.asarray(jax.jit(lambda m: m.logits(m(text).hidden))(model))[0, 6:-1]
    for event, row in zip(events, logits, strict=True):
        assert event.kept.tolist() == sorted(np.argsort(-row)[:4].tolist())
        assert event.token in event.kept


def test_experts_are_reported_for_every_token_but_the_last(model, cfg, routed):
    prompt = prompts_of(cfg, [13])[0]
    engine = make(model, cache={"keep_experts": True})
    tokens, _, finish = complete(engine, [(prompt, SamplingParams(max_tokens=4))])[0]
    assert finish.experts.shape == (cfg.n_moe_layers, 17, cfg.moe.n_active)
    assert (finish.experts[:, -1] == -1).all()
    np.testing.assert_array_equal(finish.experts[:, :-1], routed([prompt + tokens[:-1]]))


@pytest.fixture(scope="module")
def best_keys(model, cfg):
    """Return the keys [L, T, K] that score best for each token of a text, ascending, then -1."""

    def score(text):
        run = jax.jit(lambda m, t: m(t, probe=lambda tensors: tensors.index))
        output = run(model, jnp.asarray([text], jnp.int32))
        parts = zip(output.dense.probe, output.moe.probe, strict=True)
        q, k, w = (np.concatenate(part)[:, 0] for part in parts)
        heads = np.maximum(np.einsum("ltjx,lsx->ltjs", q, k), 0)
        return np.einsum("ltj,ltjs->lts", w, heads)

    def choose(text):
        scores = score(text)
        keys = np.full((*scores.shape[:2], cfg.indexer.topk), -1)
        for layer, t in np.ndindex(*scores.shape[:2]):
            best = np.argsort(-scores[layer, t, : t + 1], kind="stable")[: cfg.indexer.topk]
            keys[layer, t, : len(best)] = np.sort(best)
        return keys

    return choose


@pytest.mark.parametrize(
    "how",
    [{"prefill_chunk": 10}, {"prefill_chunk": 6}, {"prefill_chunk": 10, "speculative": True}],
    ids=["masked", "rows", "drafts"],
)
def test_selected_keys_are_reported_for_every_token_but_the_last(model, cfg, best_keys, how):
    begin = prompts_of(cfg, [21])[0]
    engine = make(model, cache={"keep_selection": True}, reuse_prefixes=True, **how)

    for i in range(2):  # the second reads the first one's pages
        prompt = [*begin, i]
        tokens, _, finish = complete(engine, [(prompt, SamplingParams(max_tokens=6, seed=i))])[0]

        assert finish.selection.shape == (cfg.n_layers, 28, cfg.indexer.topk)
        assert (finish.selection[:, -1] == -1).all()
        np.testing.assert_array_equal(finish.selection[:, :-1], best_keys(prompt + tokens[:-1]))
    assert engine.stats.reused_tokens == 20


def test_selections_are_reported_while_they_are_asked_for(model, requests, alone):
    engine = make(model)
    found = []
    for on in (False, True, False, True):
        engine.report_selection(on)
        found.append(complete(engine, [requests[1]])[0])

    assert [finish.selection is not None for _, _, finish in found] == [False, True] * 2
    assert [tokens for tokens, _, _ in found] == [alone[1][0]] * 4
    engine.submit(*requests[0])
    with pytest.raises(RuntimeError, match="no request"):
        engine.report_selection(False)


def test_a_dense_mode_has_no_selection_to_report():
    with pytest.raises(ValueError, match="keep_selection=True needs mode='sparse'"):
        dataclasses.replace(
            CFG, mode="dense", cache=dataclasses.replace(CACHE, keep_selection=True)
        )


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "no token"), ([97], "token 97 .* is not in"), ([-1], "token -1"), ([0] * 48, "no room")],
)
def test_a_prompt_that_cannot_be_run_is_refused(model, prompt, words):
    with pytest.raises(ValueError, match=words):
        make(model).submit(prompt, SamplingParams())


@pytest.mark.parametrize("speculative", [False, True])
def test_a_warmed_up_engine_compiles_nothing_more_and_draws_the_same(
    model, requests, alone, caplog, speculative
):
    engine = make(model, speculative=speculative)
    with caplog.at_level("INFO"):
        engine.warm_up()
        n_compiled = len(caplog.records)
        found = complete(engine, requests)
    assert len(caplog.records) == n_compiled > 0
    assert engine._pool.n_available == CACHE.n_pages
    if not speculative:
        assert [t for t, _, _ in found] == [t for t, _, _ in alone]


def test_the_queue_is_bounded(model):
    engine = make(model, max_waiting=2)
    for _ in range(2):
        engine.submit([1], SamplingParams())
    with pytest.raises(QueueFullError, match="max_waiting=2"):
        engine.submit([1], SamplingParams())


@pytest.mark.parametrize(("field", "value"), [("n_slots", 0), ("max_len", 1), ("max_len", 161)])
def test_a_config_that_makes_no_sense_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(CFG, **{field: value})
