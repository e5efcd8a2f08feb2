"""How many tasks a model answers rightly, by the engine that generation runs in."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from dsv32_jax import parameters
from dsv32_jax.cache import CacheConfig
from dsv32_jax.config import ModelConfig
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig
from dsv32_jax.generate.sampling import MAX_SEED, SamplingParams
from dsv32_jax.mla import DecodeMode
from dsv32_jax.parameters import Parameters
from train.rl import rollout
from train.rl.questions import Questions

PAGE_SIZE = 16


def answers_right(
    cfg: ModelConfig,
    params: Parameters,
    questions: Questions,
    numbers: Sequence[int],
    *,
    mode: DecodeMode,
    max_tokens: int,
    slots: int,
    seed: int,
    mesh: Mesh,
) -> np.ndarray:
    """Ask tasks once each, at temperature 1, and tell which answers are wholly right.

    Args:
        cfg: The model.
        params: Its arrays.
        questions: The tasks.
        numbers: Of the tasks to ask.
        mode: Attention.
        max_tokens: Longest answer.
        slots: Answers drawn at once.
        seed: Of the draws; the same gives the same answers.
        mesh: Where the parameters lie.

    Returns:
        bool, one a task; a task without a verdict counts as wrong.
    """
    asked = [questions.ask(number) for number in numbers]
    max_len = max(len(one.prompt) for one in asked) + max_tokens
    engine = Engine(
        parameters.assemble(cfg, params),
        EngineConfig(
            n_slots=slots,
            max_len=max_len,
            max_waiting=len(asked),
            cache=CacheConfig(n_pages=slots * -(-(max_len + 1) // PAGE_SIZE), page_size=PAGE_SIZE),
            mode=mode,
        ),
        eos_id=questions.eos_id,
        mesh=mesh,
    )
    requests = [
        (one.prompt, SamplingParams(seed=(seed + i) % (MAX_SEED + 1), max_tokens=max_tokens))
        for i, one in enumerate(asked)
    ]
    drawn = dict(rollout.sample(engine, requests, version=0))
    scored = questions.judge([(one, drawn[i]) for i, one in enumerate(asked)])
    return np.array([one.components.get("correct") == 1 for one in scored])
