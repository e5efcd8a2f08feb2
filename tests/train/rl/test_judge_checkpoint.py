import dataclasses
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv32_jax import parameters
from dsv32_jax.config import ModelConfig
from dsv32_jax.errors import UsageError, WorkFailedError
from train import overrides, state
from train.checkpoint import CheckpointConfig, Checkpoints
from train.rl.judge import Judge, JudgeConfig, JudgeError
from train.rl.rewards import Response, RewardConfig, Rewarder, Weights
from train.rl.tasks import Task

TASK = Task(name="t", domain="prose", question="Write a line.", rubric="Does it rhyme?")
BOS, EOS = 256, 257


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run's config.json needs to be loaded from."""

    model: ModelConfig
    tokenizer: str = "bytes"


@pytest.fixture(scope="module")
def parrot(tmp_path_factory, tiny_model):
    """Return a function that saves a model whose next token depends on the last one alone, and says one text.

    Attention and experts add nothing, so the embedding of the last token is what the head reads. All prompts end in
    the last character of a tag; no character of the text may come twice.
    """
    model = dataclasses.replace(
        tiny_model, n_layers=1, n_dense_layers=0, mtp=False, dim=24, rope=tiny_model.rope
    )

    def make(text, end=EOS):
        spoken = [ord(">"), *text.encode(), end]
        embed, head = (
            np.zeros((model.vocab_size, model.dim)),
            np.zeros((model.dim, model.vocab_size)),
        )
        for i, (before, after) in enumerate(itertools.pairwise(spoken)):
            embed[before, i], head[i, after] = 1.0, 30.0
        said = {"embed": embed, "head": head, "norm.weight": np.ones(model.dim)}
        shapes = parameters.abstract(model)
        arrays = [
            {name: said.get(name, np.zeros(leaf.shape)) for name, leaf in group.items()}
            for group in shapes
        ]
        params = parameters.Parameters(*jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arrays))
        folder = tmp_path_factory.mktemp("judge")
        (folder / "config.json").write_text(json.dumps(overrides.to_json_dict(Run(model))))
        saved = Checkpoints(folder / "checkpoints", CheckpointConfig(every_steps=1, keep_best=0))
        saved.save(1, state.TrainState(params, {}, jnp.int32(1)), data_state={}, meta={})
        saved.close()
        return folder

    return make


@pytest.fixture(scope="module")
def seven(parrot):
    return parrot("Score: 7")


def config(folder, **changes):
    given = {"max_tokens": 32, "max_len": 2048, "concurrency": 2, **changes}
    return JudgeConfig(checkpoint=str(folder), **given)


@pytest.fixture
def make(tmp_path):
    made = []

    def make(folder, *, should_stop=lambda: False, **changes):
        cfg = config(folder, **changes)
        made.append(Judge(cfg, tmp_path / "judge.jsonl", should_stop=should_stop))
        return made[-1]

    yield make
    for judge in made:
        judge.close()


def test_a_checkpoint_grades_many_responses_at_once(make, seven, tmp_path):
    judge = make(seven)
    with ThreadPoolExecutor(5) as threads:
        scores = list(threads.map(lambda text: judge.score(TASK, text), "abcde"))

    assert scores == [0.7] * 5
    replies = [json.loads(line) for line in (tmp_path / "judge.jsonl").read_text().splitlines()]
    assert [reply["text"] for reply in replies] == ["Score: 7"] * 5
    prompt = 1 + len("<｜User｜><｜Assistant｜></think>".encode())  # and the two messages
    assert all(reply["tokens"] > prompt + len("Score: 7") for reply in replies)
    assert judge.spent == sum(reply["tokens"] for reply in replies)


def test_what_a_checkpoint_said_before_is_answered_from_disk(make, seven):
    judge = make(seven)
    assert judge.score(TASK, "a") == 0.7
    spent = judge.spent

    again = make(seven)
    assert again.score(TASK, "a") == 0.7
    assert again.spent == spent


def test_another_checkpoint_is_asked_anew(make, seven, parrot):
    make(seven).score(TASK, "a")

    assert make(parrot("Score: 4")).score(TASK, "a") == 0.4


@pytest.mark.parametrize("changes", [{}, {"thinking": True}])
def test_replies_of_a_checkpoint_without_a_score_are_none(make, parrot, seven, changes):
    folder = seven if changes else parrot("No wit")  # a score that is thought is not given

    with pytest.raises(JudgeError, match="no reply of 2 ends in a line"):
        make(folder, attempts=2, **changes).score(TASK, "a")


def test_a_reply_cut_at_the_limit_is_no_score(make, seven):
    with pytest.raises(JudgeError, match="no reply of 1"):
        make(seven, attempts=1, max_tokens=8).score(TASK, "a")


def test_a_response_too_long_to_be_judged_is_no_score(make, seven):
    judge = make(seven)

    with pytest.raises(
        JudgeError, match=r"has \d{4} tokens, and max_len=2048 less max_tokens=32 leaves 2016"
    ):
        judge.score(TASK, "a" * 2000)
    assert judge.score(TASK, "a") == 0.7


def test_a_reply_that_takes_too_long_is_given_up(make, parrot):
    judge = make(
        parrot("~>"), timeout_s=1.5, max_tokens=100_000, max_len=102_000, concurrency=1
    )  # a circle

    with pytest.raises(JudgeError, match=r"gave no reply within 1\.5 s"):
        judge.score(TASK, "a")
    with pytest.raises(JudgeError, match=r"gave no reply within 1\.5 s"):
        judge.score(
            TASK, "b"
        )  # its only place was free again, or this would say the same of the first


def test_a_run_that_is_to_stop_does_not_wait_for_a_checkpoint(make, parrot):
    began = time.monotonic()
    judge = make(
        parrot("~>"),
        max_tokens=100_000,
        max_len=102_000,
        should_stop=lambda: time.monotonic() - began > 1,
    )

    with pytest.raises(WorkFailedError, match="was stopped while it waited for the judge"):
        judge.score(TASK, "a")


def test_an_engine_that_fails_stops_the_run(make, seven, monkeypatch):
    judge = make(seven)
    monkeypatch.setattr(judge._model._engine, "step", lambda: 1 / 0)

    with pytest.raises(WorkFailedError, match="the judge's engine failed: division by zero"):
        judge.score(TASK, "a")


def test_the_cap_holds_for_a_checkpoint_too(make, seven):
    with pytest.raises(WorkFailedError, match="cap of 500 tokens leaves no room"):
        make(seven, max_total_tokens=500).score(TASK, "a")


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nowhere", "no folder"), ("empty", r"has no tokenizer\.json"), ("file", "")],
)
def test_a_checkpoint_that_is_none_is_named_in_a_line(tmp_path, folder, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")

    with pytest.raises(UsageError, match=rf"^rewards\.judge\.checkpoint=.*{folder}: .*{message}"):
        Judge(config(tmp_path / folder), tmp_path / "judge.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_url": "http://x"}, "base_url and checkpoint exclude each other"),
        ({"model": "m"}, "model and checkpoint exclude each other"),
        ({"max_len": 32}, "max_len=32 must be above max_tokens=32"),
        ({"checkpoint": ""}, "checkpoint='' must be a folder"),
    ],
)
def test_settings_of_a_checkpoint_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        JudgeConfig(**{"checkpoint": "x", "max_tokens": 32, **changes})


def test_a_rewarder_judges_by_a_checkpoint(seven, tmp_path):
    cfg = RewardConfig(
        weights=(Weights(correct=0.0, judge=2.0),), style="plain", judge=config(seven), workers=1
    )

    with Rewarder(cfg, tmp_path) as rewarder:
        (scored,) = rewarder.score([TASK], [Response("moon, June", 2, cut=False)])

    assert scored.total == pytest.approx(1.4)
