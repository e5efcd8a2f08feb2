import dataclasses

import jax
import numpy as np
import pytest

from dsv32_jax import parameters
from dsv32_jax.errors import WorkFailedError
from train import state as states
from train.optimizer import AdamConfig, OptimizerConfig, Schedule, make_optimizer
from train.rl import agreement, policy, trainer
from train.rl.objective import ObjectiveConfig
from train.rl.rewards import Scored
from train.rl.settings import LearnerConfig, RolloutConfig
from train.rl.trainer import Asked

ROLLOUTS = RolloutConfig(
    prompts=3, group_size=4, max_prompt_tokens=6, max_tokens=6, slots=6, page_size=4, top_p=0.9
)
LEARNER = LearnerConfig(
    objective=ObjectiveConfig(kl_strength=0.01, off_policy_delta=0.5),
    optimizer=OptimizerConfig(
        main=Schedule(peak=5e-3), adam=AdamConfig(weight_decay=0.0, indexer_weight_decay=0.1)
    ),
    rows=4,
    row_length=32,
)


class Low:
    """Rewards tokens of the vocabulary's lower half; every fifth prompt is too long."""

    eos_id = 0

    def __init__(self, cfg, reward=None):
        self.half, self.reward = cfg.vocab_size // 2, reward

    def ask(self, number):
        rng = np.random.default_rng(number)
        n = 9 if number % 5 == 4 else 3 + number % 3
        return Asked("low", rng.integers(1, self.half, size=n).tolist(), number, "low")

    def judge(self, answers):
        if self.reward is not None:
            rewards = [self.reward(task, drawn) for task, drawn in answers]
        else:
            rewards = [float(np.mean(drawn.response < self.half)) for _, drawn in answers]
        return [Scored(reward, {}, "raised" if reward is None else None) for reward in rewards]


@pytest.fixture(scope="module")
def create(cfg, params, mesh):
    def create(stage):
        optimizer = make_optimizer(LEARNER.optimizer.adam)
        layout = states.shardings(cfg, optimizer, stage, mesh)
        copy = jax.tree.map(lambda x: x + 0, params)  # the update donates it
        return states.create(copy, optimizer, stage, layout)

    return create


@pytest.fixture
def state(create):
    return create("rl")


def make_sampler(cfg, params, tasks=None, rollouts=ROLLOUTS):
    sampler = trainer.Sampler(cfg, rollouts, tasks or Low(cfg), seed=3)
    sampler.push(params, 0)
    return sampler


def make_learner(cfg, **changes):
    settings = dataclasses.replace(LEARNER, **changes)
    return trainer.Learner(cfg, settings, kl_strength={}, max_tokens=ROLLOUTS.max_tokens)


@pytest.fixture(scope="module")
def drawn(cfg, params):
    return make_sampler(cfg, params).draw()


def test_a_draw_has_a_group_for_each_prompt_and_tells_what_happened(cfg, drawn):
    assert [len(g.rollouts) for g in drawn.groups] == [4, 4, 4]
    prompts = [g.rollouts[0].tokens[: g.rollouts[0].n_prompt].tolist() for g in drawn.groups]
    assert prompts == [Low(cfg).ask(i).prompt for i in range(3)]
    texts = {tuple(r.response.tolist()) for g in drawn.groups for r in g.rollouts}
    assert len(texts) > 6  # each response has a seed of its own
    rewards = [reward for g in drawn.groups for reward in g.rewards]
    np.testing.assert_allclose(drawn.figures["reward/mean"], np.mean(rewards))
    assert drawn.figures["responses"] == 12
    assert drawn.figures["reward/faults"] == 0


def test_prompts_that_are_too_long_are_passed_over_and_counted(cfg, params):
    sampler = make_sampler(cfg, params, rollouts=dataclasses.replace(ROLLOUTS, prompts=5))

    found = sampler.draw()

    assert sampler.next_task == 6
    assert found.figures["prompts_too_long"] == 1


def test_tasks_that_never_fit_stop_the_run(cfg, params):
    sampler = make_sampler(cfg, params, rollouts=dataclasses.replace(ROLLOUTS, max_prompt_tokens=2))
    with pytest.raises(WorkFailedError, match="prompts of at most max_prompt_tokens=2 tokens"):
        sampler.draw()


def test_groups_that_teach_nothing_are_drawn_again(cfg, params):
    def reward(task, drawn):
        return 1.0 if task.task in (0, 2) else float(drawn.response[0])

    again = make_sampler(
        cfg, params, Low(cfg, reward), dataclasses.replace(ROLLOUTS, rounds=3)
    ).draw()
    once = make_sampler(cfg, params, Low(cfg, reward)).draw()

    assert len(again.groups) == 3
    assert not any(g.is_degenerate for g in again.groups)
    assert again.figures["reward/equal_groups"] == once.figures["reward/equal_groups"] == 2
    assert [g.is_degenerate for g in once.groups] == [True, False, True]


def test_responses_without_a_reward_teach_nothing_and_are_counted(cfg, params):
    def reward(task, drawn):
        return None if task.task == 1 else float(drawn.response[0] % 5)

    found = make_sampler(cfg, params, Low(cfg, reward)).draw()

    assert len(found.groups) == 2
    assert found.figures["reward/faults"] == 4
    assert found.figures["without_group"] == 1


def test_a_resumed_sampler_draws_the_same(cfg, params):
    first, again = make_sampler(cfg, params), make_sampler(cfg, params)
    first.draw()
    again.next_task = first.next_task

    for mine, other in zip(first.draw().groups, again.draw().groups, strict=True):
        for a, b in zip(mine.rollouts, other.rollouts, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)


def test_what_is_drawn_agrees_with_the_learner(cfg, params, drawn):
    rollouts = [r for g in drawn.groups for r in g.rollouts]

    found = agreement.compare(
        policy.make_score(cfg), params, rollouts, n_rows=4, row_length=32, tolerance=1e-3
    )

    assert found.over == 0


def test_a_first_step_has_a_ratio_of_one_and_no_kl(cfg, params, state, drawn):
    after, figures = make_learner(cfg).step(state, params, drawn.groups, 0)

    assert abs(figures["ratio/mean"] - 1) < 1e-4
    assert figures["kl"] < 1e-6
    assert figures["masked_fraction"] == figures["clip_fraction"] == figures["rerouted"] == 0
    assert figures["grad_norm"] > 0
    assert figures["lr"] == np.float32(5e-3)
    assert after.step == 1


@pytest.fixture(scope="module")
def three_updates(cfg, params, create, drawn):
    learner = make_learner(cfg, minibatches=3, ratio_against="learner")
    return learner.step(create("rl"), params, drawn.groups, 0)


def test_minibatches_are_steps_of_their_own_from_the_same_old_policy(three_updates):
    after, figures = three_updates

    assert after.step == 3
    # The second and third are off the policy that drew.
    assert 1e-5 < abs(figures["ratio/mean"] - 1) < 0.5


def test_indexers_without_a_learning_rate_stay_as_they_are(params, three_updates):
    after, figures = three_updates

    for name, old in params.weights.items():
        fixed = parameters.is_indexer(name) or name.startswith("mtp.")
        assert np.array_equal(after.parameters.weights[name], old) == fixed, name
    assert not any("indexer" in name for name in figures)


def test_indexers_with_a_learning_rate_train_by_a_mean_over_the_minibatchs_tokens(
    cfg, params, create, drawn
):
    optimizer = dataclasses.replace(LEARNER.optimizer, indexer=Schedule(peak=2e-3))
    learner = make_learner(cfg, optimizer=optimizer, rows=2)

    after, figures = learner.step(create("rl_indexer"), params, drawn.groups, 0)
    _, of_twice = learner.step(create("rl_indexer"), params, drawn.groups * 2, 0)

    for name, old in params.weights.items():
        moves = not name.startswith("mtp.")
        assert np.array_equal(after.parameters.weights[name], old) != moves, name
    assert figures["indexer_lr"] == np.float32(2e-3)
    for name in ("indexer_kl", "indexer_grad_norm", "grad_norm"):
        assert figures[name] > 0.01
        np.testing.assert_allclose(of_twice[name], figures[name], rtol=1e-3, err_msg=name)


def test_a_gradient_that_is_no_number_stops_the_run(cfg, params, state, drawn):
    broken = dataclasses.replace(
        drawn.groups[0].rollouts[0], log_p=np.full_like(drawn.groups[0].rollouts[0].log_p, -1e4)
    )
    group = drawn.groups[0]._replace(rollouts=(broken, *drawn.groups[0].rollouts[1:]))

    with pytest.raises(WorkFailedError, match=r"the gradient is .* at step 8"):
        make_learner(cfg).step(state, params, [group], 7)


def test_without_any_kl_no_reference_is_wanted(cfg):
    objective = dataclasses.replace(LEARNER.objective, kl_strength=0.0)
    bare = make_learner(cfg, objective=objective)
    some = trainer.Learner(
        cfg,
        dataclasses.replace(LEARNER, objective=objective),
        kl_strength={"writing": 0.1},
        max_tokens=6,
    )

    assert not bare.uses_reference
    assert some.uses_reference


def test_the_loop_raises_the_reward(cfg, params, state):
    fast = dataclasses.replace(LEARNER.optimizer, main=Schedule(peak=2e-2))
    sampler, learner = make_sampler(cfg, params), make_learner(cfg, optimizer=fast)
    rewards = []
    for step in range(8):
        sampler.push(state.parameters, step)
        found = sampler.draw()
        rewards.append(found.figures["reward/mean"])
        state, _ = learner.step(state, params, found.groups, step)

    assert np.mean(rewards[-2:]) > rewards[0] + 0.1


def test_a_kl_without_weight_is_refused():
    with pytest.raises(ValueError, match=r"indexer_kl=0\.0 must be positive"):
        dataclasses.replace(LEARNER, indexer_kl=0.0)
