"""The Speciale setting for the released 671B model: reasoning alone, and no penalty on length.

Source: DeepSeek-V3.2 report, section 3: trained on reasoning data only with a reduced length penalty, beside proof data
with rewards of DeepSeekMath-V2, for which a judge with a rubric stands here (`rewards.judge`, tasks with a `rubric`).
Chosen here: 65,536 tokens, R1's second limit, and no length penalty at all.
Command: python -m train.grpo --config v32_671b_speciale.py init_from=DIR tasks.files=PROBLEMS.jsonl distributed=true
Hardware: a pod. Never run; in the tests it builds and a minibatch's update traces on 512 devices, and an update of
other row lengths compiles for pods (`train.compile --steps grpo`).
"""

from dataclasses import replace

from configs import v32_671b_grpo
from train.rl.rewards import Weights
from train.rl.run_config import GrpoConfig

MAX_TOKENS = 64 * 1024


def get_config() -> GrpoConfig:
    """Return the run; placeholders as in the config it is made from."""
    base = v32_671b_grpo.get_config()
    return replace(
        base,
        rewards=replace(
            base.rewards, weights=(Weights(correct=1.0, format=0.1, language=0.1),), length=None
        ),
        rl=replace(
            base.rl,
            rollouts=replace(base.rl.rollouts, max_tokens=MAX_TOKENS),
            learner=replace(base.rl.learner, row_length=MAX_TOKENS + 2048),
        ),
    )
