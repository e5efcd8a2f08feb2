"""An evaluation: the policies that the command line names, on the held-out tasks of `configs.grpo`.

Command: python -m train.evaluate policies=runs/grpo
Hardware: that of the policies.
"""

from configs import grpo
from train.agents.loop import Limits
from train.evaluation.config import EngineSettings, EvaluateConfig


def get_config() -> EvaluateConfig:
    """Return the evaluation."""
    rl = grpo.get_config()
    assert rl.tasks is not None, "the default run has tasks"
    return EvaluateConfig(
        families=rl.tasks.families,
        form="plain",
        limits=Limits(steps=20, tokens=4096),
        engine=EngineSettings(max_len=512),
    )
