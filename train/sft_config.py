"""A run of supervised fine-tuning as one value: the base, the examples, what trains and what is measured."""

from dataclasses import dataclass, field, replace
from typing import Literal

from dsv32_jax.config import ModelConfig, require
from dsv32_jax.sharding import MeshConfig
from train.checkpoint import CheckpointConfig
from train.data.config import DataConfig
from train.divergence import LossGuardConfig
from train.metrics import MetricsConfig
from train.rl.rewards import RewardConfig
from train.rl.task_source import TaskConfig
from train.run_config import RunConfig, StageConfig

SftStage = Literal["dense", "sparse"]


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """Pre-training of a model to begin with.

    Attributes:
        data: The text.
        dense: Ordinary pre-training.
        warmup: The indexers' warm-up; None where the fine-tuning is dense.
        sparse: Everything under the selection; None leaves it out.
    """

    data: DataConfig
    dense: StageConfig
    warmup: StageConfig | None = None
    sparse: StageConfig | None = None


@dataclass(frozen=True, kw_only=True)
class SolvedConfig:
    """Solved tasks as examples, and others, which no example shows, to measure by.

    Attributes:
        tasks: What is asked.
        examples: Solved tasks to train on, in place of `data.sources`; 0 trains on those.
        rewards: How answers are judged, and the format that they and the examples have.
        instruction: Put behind each question.
        measured: Held-out tasks that are asked before and after.
        max_tokens: Longest answer.
        slots: Answers drawn at once.
    """

    tasks: TaskConfig
    examples: int
    rewards: RewardConfig = field(default_factory=RewardConfig)
    instruction: str = ""
    measured: int
    max_tokens: int
    slots: int = 32

    def __post_init__(self) -> None:
        """Check ranges."""
        for name, least in (("examples", 0), ("measured", 1), ("max_tokens", 1), ("slots", 1)):
            value = getattr(self, name)
            require(value >= least, f"{name}={value} must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """A run.

    Attributes:
        model: The model.
        data: The examples, see `train.data.examples`: only the tokens that they say train.
        stage: Attention and what trains, as in pre-training: "dense", or "sparse" with the indexers' KL.
        training: Steps, optimizer, losses.
        init_from: The folder of a run, or of a converted checkpoint, to begin with.
        base: Make that model first; exactly one of the two must be given.
        solved: Tasks to train on, and to measure by; None measures the held-out loss alone.
        held_out_rows: Rows of held-out examples that the loss is measured on.
        mesh: Layout of the devices.
        seed: Of the weights' draw and of measured answers.
        checkpoint: When to save and what to keep.
        metrics: Where numbers go.
        guard: When the loss counts as diverged.
        distributed: Join the other processes of a pod first (`jax.distributed.initialize`).
    """

    model: ModelConfig
    data: DataConfig
    stage: SftStage = "sparse"
    training: StageConfig
    init_from: str | None = None
    base: BaseConfig | None = None
    solved: SolvedConfig | None = None
    held_out_rows: int = 64
    mesh: MeshConfig = MeshConfig()
    seed: int = 0
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    guard: LossGuardConfig = LossGuardConfig()
    distributed: bool = False

    def __post_init__(self) -> None:
        """Check the fields that must fit each other; those of the stage as pre-training checks them."""
        require(
            self.data.examples, "data.examples must be true: fine-tuning trains on examples alone"
        )
        require(
            self.init_from is None or self.base is None,
            "init_from and base exclude each other: set base=none to begin with init_from",
        )
        require(
            self.init_from is not None or self.base is not None,
            "a model to begin with is needed: init_from=DIR, a run's folder or a converted checkpoint, or base",
        )
        require(
            self.data.heldout_fraction > 0,
            "data.heldout_fraction=0 leaves no example to measure the loss on",
        )
        require(
            self.stage == "dense" or self.base is None or self.base.warmup is not None,
            "base.warmup=none leaves the indexers untrained, by which stage=sparse selects; set stage=dense",
        )
        self.run  # noqa: B018  # its own checks name the stage's fields
        rows, at_once = self.held_out_rows, self.rows_at_once
        require(
            rows >= 2 and rows % at_once == 0,
            f"held_out_rows={rows} must be at least 2 and a multiple of the {at_once} rows of a microbatch",
        )

    @property
    def rows_at_once(self) -> int:
        """Rows that the loss is measured on at once: those of a microbatch of training."""
        return self.run.stage_data(self.stage).batch_size // self.training.microbatches

    @property
    def run(self) -> RunConfig:
        """The fine-tuning as a run of pre-training's one stage."""
        return RunConfig(
            model=self.model,
            data=self.data,
            init_from=self.init_from or "base",
            mesh=self.mesh,
            seed=self.seed,
            checkpoint=self.checkpoint,
            metrics=self.metrics,
            guard=self.guard,
            dense=self.training if self.stage == "dense" else None,
            sparse=self.training if self.stage == "sparse" else None,
        )

    def base_run(self) -> RunConfig:
        """Return the base as a run of pre-training.

        Returns:
            The run.

        Raises:
            ValueError: If the fields do not fit each other.
        """
        assert self.base is not None, "the run begins with another's model"
        return RunConfig(
            model=self.model,
            data=replace(self.base.data, tokenizer=self.data.tokenizer),
            dense=self.base.dense,
            warmup=self.base.warmup,
            sparse=self.base.sparse,
            mesh=self.mesh,
            seed=self.seed,
            checkpoint=replace(self.checkpoint, keep_best=0),
            metrics=self.metrics,
            guard=self.guard,
        )
