"""A run as one value: the model, the text, the mesh and the stages in order."""

import math
from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh, Mesh

from dsv32_jax.config import ModelConfig, require
from dsv32_jax.sharding import BATCH_AXES, MeshConfig
from train.checkpoint import CheckpointConfig
from train.data.config import DataConfig
from train.divergence import LossGuardConfig
from train.metrics import MetricsConfig
from train.optimizer import OptimizerConfig
from train.stage import INDEXER_TRAINS, MAIN_TRAINS, Stage
from train.step import LossConfig

ORDER: tuple[Stage, ...] = ("dense", "warmup", "sparse")


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One training stage.

    Attributes:
        steps: Optimizer steps.
        optimizer: Learning rates and AdamW; moments start fresh in each stage.
        loss: Coefficients.
        microbatches: Parts a batch is worked on in, one after the other.
        seq_len: Tokens per row; None takes the data's.
        batch_size: Rows per step over all hosts; None takes the data's.
    """

    steps: int
    optimizer: OptimizerConfig
    loss: LossConfig = LossConfig()
    microbatches: int = 1
    seq_len: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.steps >= 1, f"steps={self.steps} must be at least 1")
        require(self.microbatches >= 1, f"microbatches={self.microbatches} must be at least 1")
        for name, least in (("seq_len", 2), ("batch_size", 1)):
            value = getattr(self, name)
            require(value is None or value >= least, f"{name}={value} must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class EvidenceConfig:
    """What is measured after the sparse stage.

    Attributes:
        rows: Held-out rows.
        rows_per_batch: Rows measured at once.
        caveat: What the run cannot show, for its report.
        controls: Also train the two controls, dense continued and a last-k window, on the sparse stage's tokens.
    """

    rows: int
    rows_per_batch: int
    caveat: str
    controls: bool = True

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.rows >= 2, f"rows={self.rows} must be at least 2, for a standard error")
        require(
            self.rows_per_batch >= 1 and self.rows % self.rows_per_batch == 0,
            f"rows_per_batch={self.rows_per_batch} must divide rows={self.rows}",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run: stages in the order dense, warmup, sparse, each starting from the one before.

    Attributes:
        model: The model.
        data: The text.
        dense: Ordinary pre-training; None leaves the stage out.
        warmup: Dense attention, only the indexers train.
        sparse: Everything trains under the selection.
        init_from: A run's folder to start from; the stages up to the one that it ended with are taken as done.
        mesh: Layout of the devices.
        seed: Of the weights' draw.
        checkpoint: When to save and what to keep.
        metrics: Where numbers go.
        guard: When the loss counts as diverged.
        evidence: Measurements after the sparse stage; None for none.
        distributed: Join the other processes of a pod first (`jax.distributed.initialize`).
    """

    model: ModelConfig
    data: DataConfig
    dense: StageConfig | None = None
    warmup: StageConfig | None = None
    sparse: StageConfig | None = None
    init_from: str | None = None
    mesh: MeshConfig = MeshConfig()
    seed: int = 0
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    guard: LossGuardConfig = LossGuardConfig()
    evidence: EvidenceConfig | None = None
    distributed: bool = False

    def __post_init__(self) -> None:
        """Check the fields that must fit each other."""
        require(bool(self.stages), "a run needs at least one of the stages dense, warmup, sparse")
        require(0 <= self.seed < 2**32, f"seed={self.seed} must be in [0, 2**32)")
        require(
            self.stages[0] == "dense" or self.init_from is not None,
            f"the run begins with the stage {self.stages[0]}, which needs init_from=DIR, the run before it",
        )
        require(
            self.evidence is None or self.stages[-1] == "sparse",
            "evidence is measured after the sparse stage, which the run does not have",
        )
        for stage in self.stages:
            self._check_stage(stage)

    def _check_stage(self, stage: Stage) -> None:
        cfg, data = self.stage_config(stage), self.stage_data(stage)
        for group, stages in (("main", MAIN_TRAINS), ("indexer", INDEXER_TRAINS)):
            given = getattr(cfg.optimizer, group) is not None
            require(
                given == (stage in stages),
                f"{stage}.optimizer.{group} must {'not ' if given else ''}be given: "
                f"the {stage} stage {'does not train' if given else 'trains'} it",
            )
        require(
            data.batch_size % cfg.microbatches == 0,
            f"{stage}.microbatches={cfg.microbatches} must divide the batch of {data.batch_size} rows",
        )
        require(
            stage == "dense" or self.model.indexer.topk < data.seq_len,
            f"model.indexer.topk={self.model.indexer.topk} must be below the {stage} stage's "
            f"seq_len={data.seq_len}, or every key is selected",
        )
        require(
            not self.model.mtp or data.seq_len >= 3,
            f"{stage} seq_len={data.seq_len} must be at least 3 with MTP",
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in order."""
        return tuple(stage for stage in ORDER if getattr(self, stage) is not None)

    def stage_config(self, stage: Stage) -> StageConfig:
        """Return the settings of one of the run's stages."""
        found = getattr(self, stage)
        assert found is not None, f"the run has no stage {stage}"
        return found

    def stage_data(self, stage: Stage) -> DataConfig:
        """Return the text of one of the run's stages: its row length and batch, in an order of its own."""
        cfg = self.stage_config(stage)
        return replace(
            self.data,
            seq_len=cfg.seq_len or self.data.seq_len,
            batch_size=cfg.batch_size or self.data.batch_size,
            seed=(self.data.seed + ORDER.index(stage)) % 2**32,
        )

    def check_mesh(self, mesh: Mesh) -> None:
        """Check that the mesh divides what it cuts.

        Args:
            mesh: The devices.

        Raises:
            ValueError: If an axis does not divide a size; names both.
        """
        check_model_on_mesh(self.model, mesh)
        for stage in self.stages:
            data = self.stage_data(stage)
            rows = data.batch_size // self.stage_config(stage).microbatches
            check_rows(mesh, rows, f"{stage} batch_size / microbatches")
            check_row_length(mesh, data.seq_len, f"{stage} seq_len")
        if self.evidence is not None:
            check_rows(mesh, self.evidence.rows_per_batch, "evidence.rows_per_batch")


def check_model_on_mesh(model: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Check that the mesh divides the heads and experts that it cuts.

    Args:
        model: The model.
        mesh: The devices.

    Raises:
        ValueError: If an axis does not divide a size; names both.
    """
    check_divides(mesh, model.mla.n_heads, "model.mla.n_heads", "tensor")
    check_divides(mesh, model.moe.n_experts, "model.moe.n_experts", "expert")
    check_divides(mesh, model.moe.expert_dim, "model.moe.expert_dim", "tensor")


def check_rows(mesh: Mesh | AbstractMesh, n_rows: int, name: str) -> None:
    """Check that the mesh divides the rows of a batch; raises `ValueError` as `check_divides` does."""
    check_divides(mesh, n_rows, name, *BATCH_AXES)


def check_row_length(mesh: Mesh | AbstractMesh, n_tokens: int, name: str) -> None:
    """Check that the mesh divides the tokens of a row; raises `ValueError` as `check_divides` does."""
    check_divides(mesh, n_tokens, name, "context", "tensor")


def check_divides(mesh: Mesh | AbstractMesh, size: int, name: str, *axes: str) -> None:
    """Check that axes of a mesh divide a size.

    Args:
        mesh: The devices.
        size: What is cut.
        name: For the message.
        axes: That cut it.

    Raises:
        ValueError: If they do not.
    """
    shards = math.prod(mesh.shape[axis] for axis in axes)
    require(
        size % shards == 0,
        f"{name}={size} is not a multiple of the {shards} shards of mesh axes {', '.join(axes)}",
    )
