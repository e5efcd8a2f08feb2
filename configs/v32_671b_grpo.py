"""Reinforcement learning of the released 671B model on reasoning tasks, with every stabiliser of the report.

Source: DeepSeek-V3.2 report, section 3.1, for the objective and the rewards' components; it publishes no figures. From
DeepSeek-R1: 32,768 tokens, groups of 16, 512 prompts a rollout in 16 minibatches of one epoch, learning rate 3e-6, KL
0.001, the policy taken as reference every 400 optimizer steps (25 rollouts). From the model's card: top-p 0.95. Chosen
here: no KL in mathematics ("weak or zero" in the report), delta 0.5 nats a token, clipping 0.2 and 0.28, the length
penalty's range, the weights of format and language.
Command: python -m train.grpo --config v32_671b_grpo.py init_from=DIR tasks.files=TASKS.jsonl distributed=true
Hardware: a pod. Never run; in the tests it builds and a minibatch's update traces on 512 devices, and an update of
other row lengths compiles for pods (`train.compile --steps grpo`).
"""

from dsv32_jax import config
from dsv32_jax.sharding import MeshConfig
from train.checkpoint import CheckpointConfig
from train.optimizer import AdamConfig, OptimizerConfig, Schedule
from train.rl.objective import ObjectiveConfig
from train.rl.problems import Family
from train.rl.rewards import LengthConfig, RewardConfig, Weights
from train.rl.run_config import DomainKl, GrpoConfig
from train.rl.settings import GateConfig, LearnerConfig, RlConfig, RolloutConfig
from train.rl.task_source import TaskConfig

FAMILIES = (
    "countdown", "puzzle24", "sudoku", "knights_knaves", "zebra_puzzles", "maze", "graph_color", "circuit_logic",
    "polynomial_equations", "intermediate_integration", "prime_factorization", "base_conversion", "word_ladder",
    "cryptarithm", "game_of_life", "syllogism",
)  # fmt: skip
MAX_TOKENS = 32 * 1024


def get_config() -> GrpoConfig:
    """Return the run; `init_from` is a placeholder to be overridden, and `tasks.files` add tasks of one's own."""
    return GrpoConfig(
        model=config.v32_671b(),
        tokenizer="tokenizer.json",
        instruction="Put the final answer within \\boxed{}.",
        tasks=TaskConfig(families=tuple(Family(name=name) for name in FAMILIES), held_out=16),
        rewards=RewardConfig(
            weights=(Weights(correct=1.0, format=0.1, length=0.1, language=0.1),),
            style="thinking",
            length=LengthConfig(free=MAX_TOKENS // 2, limit=MAX_TOKENS),
            workers=32,
        ),
        rl=RlConfig(
            steps=650,
            rollouts=RolloutConfig(
                prompts=512, group_size=16, temperature=1.0, top_p=0.95, max_prompt_tokens=2048,
                max_tokens=MAX_TOKENS, slots=512, page_size=64, rounds=2,
            ),
            learner=LearnerConfig(
                objective=ObjectiveConfig(
                    clip_low=0.2, clip_high=0.28, kl_strength=0.001, off_policy_delta=0.5
                ),
                optimizer=OptimizerConfig(
                    main=Schedule(peak=3e-6, warmup_steps=10),
                    adam=AdamConfig(weight_decay=0.0, mu_dtype="bfloat16"),
                ),
                minibatches=16, rows=16, row_length=MAX_TOKENS + 2048, reference_every=25,
            ),
            # An FP8 key or a routed expert at an edge may flip by rounding; more than this stops the run.
            gate=GateConfig(prompts=32, tolerance=0.5, share=0.01),
            evaluate_every=10, evaluate_tasks=256,
        ),
        domain_kl=(DomainKl(domain="algebra", strength=0.0), DomainKl(domain="arithmetic", strength=0.0)),
        init_from="converted/",
        mesh=MeshConfig(ici_fsdp=1, ici_expert=16, ici_context=-1),
        checkpoint=CheckpointConfig(every_steps=10, keep_last=2, keep_best=0, verify="size"),
    )  # fmt: skip
