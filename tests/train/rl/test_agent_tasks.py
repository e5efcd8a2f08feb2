import dataclasses

import jax
import numpy as np
import pytest

from dsv32_jax import config, parameters
from dsv32_jax.errors import UsageError
from dsv32_jax.tokenizer import ByteTokenizer
from train import state as states
from train.agents.attempt import Limits
from train.agents.context import ContextConfig
from train.optimizer import AdamConfig, OptimizerConfig, Schedule, make_optimizer
from train.rl import agreement, policy, trainer
from train.rl.agent_tasks import (
    AgentConfig,
    AgentSource,
    AgentTasks,
    EnvironmentShare,
    make_environment,
)
from train.rl.groups import Group
from train.rl.objective import ObjectiveConfig
from train.rl.settings import LearnerConfig, RolloutConfig

BYTES = ByteTokenizer()
ROW = 256
AGENT = AgentConfig(
    environments=(EnvironmentShare(name="train.agents.keys:Keys"),),
    unseen=(EnvironmentShare(name="train.agents.keys:UnseenKeys"),),
    form="compact",
    limits=Limits(steps=6, tokens=60, result_chars=8),
    context=ContextConfig(strategy="discard_all", share=0.6),
    held_out=3,
)
ROLLOUTS = RolloutConfig(
    prompts=2, group_size=3, max_prompt_tokens=40, max_tokens=60, slots=4, page_size=8, top_p=0.95
)
LEARNER = LearnerConfig(
    objective=ObjectiveConfig(kl_strength=0.0, off_policy_delta=None),
    optimizer=OptimizerConfig(main=Schedule(peak=1e-3), adam=AdamConfig(weight_decay=0.0)),
    rows=2,
    row_length=ROW,
)


@pytest.fixture(scope="module")
def cfg():
    return dataclasses.replace(config.tiny(), vocab_size=264, mtp=False)


@pytest.fixture(scope="module")
def weights(cfg):
    """Weights under which the token that ends a turn is likely, so that there are several turns."""
    rng = np.random.default_rng(3)

    def fill(name, leaf):
        one = "norm" in name and name.endswith("weight")
        return (one + 0.2 * rng.normal(size=leaf.shape)).astype(leaf.dtype)

    groups = [{n: fill(n, a) for n, a in group.items()} for group in parameters.abstract(cfg)]
    # The first channel is the same for every token, and only the end of a turn reads it.
    groups[0]["embed"][:, 0] = 4.0
    groups[0]["head"][0] = np.arange(cfg.vocab_size) == BYTES.eos_id
    return parameters.Parameters(*jax.tree.map(jax.numpy.asarray, groups))


@pytest.fixture(scope="module")
def sampler(cfg, weights):
    tasks = AgentTasks(AgentSource(AGENT, 0), AGENT, BYTES, row=ROW)
    made = trainer.Sampler(cfg, ROLLOUTS, tasks, seed=3)
    made.push(weights, 0)
    return made


@pytest.fixture(scope="module")
def drawn(sampler):
    tasks = AgentTasks(AgentSource(AGENT, 0), AGENT, BYTES, row=ROW)
    return sampler.respond([tasks.ask(i) for i in range(12)])


def test_sampler_and_learner_agree_on_episodes_of_several_turns_and_contexts(cfg, weights, drawn):
    found = agreement.compare(
        policy.make_score(cfg), weights, drawn, n_rows=2, row_length=ROW, tolerance=1e-3
    )
    assert any(one.outcome.steps > 1 for one in drawn)
    assert any(len(one.starts) > 1 for one in drawn)
    assert found.tokens == sum(one.trainable.sum() for one in drawn) > 100
    assert found.largest < 1e-4
    assert all(len(one.tokens) <= ROW for one in drawn)


def test_the_same_weights_and_tasks_give_the_same_episodes(sampler, drawn):
    tasks = AgentTasks(AgentSource(AGENT, 0), AGENT, BYTES, row=ROW)
    again = sampler.respond([tasks.ask(i) for i in range(12)])
    for one, other in zip(drawn, again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.log_p, other.log_p)


def test_the_learner_takes_episodes_with_a_ratio_of_one(cfg, weights, drawn, mesh):
    optimizer = make_optimizer(LEARNER.optimizer.adam)
    layout = states.shardings(cfg, optimizer, "rl", mesh)
    copy = jax.tree.map(lambda x: x + 0, weights)
    state = states.create(copy, optimizer, "rl", layout)
    learner = trainer.Learner(cfg, LEARNER, kl_strength={}, max_tokens=60)
    groups = [Group("keys", tuple(drawn[:3]), (0.0, 1.0, 0.0))]
    _, figures = learner.step(state, None, groups, 0)
    assert figures["ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert figures["grad_norm"] > 0


def test_rewards_are_the_verifiers_scores(drawn):
    tasks = AgentTasks(AgentSource(AGENT, 0), AGENT, BYTES, row=ROW)
    asked = tasks.ask(0)
    grade = dataclasses.replace(drawn[0].outcome.grade, score=0.5)
    good = dataclasses.replace(drawn[0], outcome=dataclasses.replace(drawn[0].outcome, grade=grade))
    bad = dataclasses.replace(
        drawn[0], outcome=dataclasses.replace(drawn[0].outcome, grade=None, note="gone")
    )
    first, second = tasks.judge([(asked, good), (asked, bad)])
    assert (first.total, first.components["correct"]) == (0.5, 0.5)
    assert (second.total, second.fault, second.message) == (None, "sandbox", "gone")


def test_tasks_are_numbered_and_what_is_held_out_comes_in_turns():
    source = AgentSource(AGENT, 0)
    tasks = AgentTasks(source, AGENT, BYTES, row=ROW)
    assert tasks.ask(5).prompt == tasks.ask(5).prompt
    assert tasks.ask(5).task.task.name == "keys:train:0:5"
    assert [posed.environment.name for posed in source.held_out] == ["keys", "unseen_keys"] * 3
    assert AgentSource(AGENT, 1)[5].task.data != source[5].task.data


def test_environments_are_found_by_name():
    assert make_environment("train.agents.keys:Keys").name == "keys"
    for name in ("train.agents.keys:Locks", "train.no_such:Keys", "train.agents.keys:Tool"):
        with pytest.raises(UsageError, match="there is no environment"):
            make_environment(name)
    assert EnvironmentShare.from_text("a.b:C@2.5") == EnvironmentShare(name="a.b:C", weight=2.5)
    assert EnvironmentShare.from_text("a.b:C").weight == 1


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match="no effect with form=official"):
        dataclasses.replace(AGENT, form="official", describe=True)
    with pytest.raises(ValueError, match="nothing to train on"):
        dataclasses.replace(AGENT, environments=())
