"""A run of reinforcement learning as one value: the policy, what it is asked, how it is rewarded, how it learns."""

import dataclasses
import math
from dataclasses import dataclass, field

import jax
from jax.sharding import AbstractMesh, Mesh

from dsv32_jax import tokenizer as tokenizers
from dsv32_jax.config import ModelConfig, require
from dsv32_jax.sharding import MeshConfig, make_mesh
from train.checkpoint import CheckpointConfig
from train.data.config import DataConfig, Source
from train.metrics import MetricsConfig
from train.rl.agent_tasks import AgentConfig
from train.rl.answer import THINKING_STYLES
from train.rl.rewards import RewardConfig
from train.rl.settings import RlConfig
from train.rl.task_source import TaskConfig
from train.run_config import (
    RunConfig,
    StageConfig,
    check_model_on_mesh,
    check_row_length,
    check_rows,
)


@dataclass(frozen=True, kw_only=True)
class DomainKl:
    """The strength of the KL from the reference in one domain.

    Attributes:
        domain: Of the tasks.
        strength: Factor on the KL; 0 leaves it out.
    """

    domain: str
    strength: float

    def __post_init__(self) -> None:
        """Check the range."""
        require(
            0 <= self.strength < math.inf,
            f"strength={self.strength} of {self.domain} must be finite and not negative",
        )

    @classmethod
    def from_text(cls, text: str) -> "DomainKl":
        """Read a strength off a command line.

        Args:
            text: `DOMAIN:STRENGTH`, such as `math:0`.

        Returns:
            The strength.

        Raises:
            ValueError: If it is not written so.
        """
        domain, colon, strength = text.rpartition(":")
        require(bool(colon and domain), f"{text!r} must be written DOMAIN:STRENGTH")
        try:
            return cls(domain=domain, strength=float(strength))
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ColdStartConfig:
    """Pre-training on solved tasks before the first response is drawn: a small policy that knows the format.

    Attributes:
        examples: Solved tasks, none of which is held out.
        worked: Share of the examples that show the steps to the answer as thinking, where `working` knows them, or the
            calls of tools; the others answer at once. Needs a format with thinking, or tools.
        seq_len: Tokens of a row.
        batch_size: Rows of a step.
        dense: Dense attention.
        warmup: The indexers' warm-up.
        sparse: Everything under the selection.
        masked: Train on the answers alone, not on the questions before them.
    """

    examples: int
    worked: float = 0.0
    seq_len: int
    batch_size: int
    dense: StageConfig
    warmup: StageConfig
    sparse: StageConfig
    masked: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.examples >= 1, f"examples={self.examples} must be at least 1")
        require(0 <= self.worked <= 1, f"worked={self.worked} must be in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """A run.

    Attributes:
        model: The policy.
        tokenizer: "bytes", or the path of a `tokenizer.json` or its folder.
        instruction: Put behind each question, such as how to mark the final answer.
        tasks: What is asked, each answered in one turn.
        agent: Tasks with tools instead; exactly one of the two must be given. The verifier's score is the reward:
            `rewards` and `instruction` have no part in it.
        rewards: How responses are rewarded, and the format they should have.
        rl: How responses are drawn and learned from.
        domain_kl: The KL's strength in domains that have one of their own.
        init_from: The folder of a run, or of a converted checkpoint, whose model is the policy to begin with.
        cold_start: Make that policy first; exactly one of the two must be given.
        mesh: Layout of the devices.
        seed: Of the weights' draw, the tasks' and the responses'.
        checkpoint: When to save and what to keep.
        metrics: Where numbers go.
        distributed: Join the other processes of a pod first (`jax.distributed.initialize`).
    """

    model: ModelConfig
    tokenizer: str = tokenizers.BYTES
    instruction: str = ""
    tasks: TaskConfig | None = None
    agent: AgentConfig | None = None
    rewards: RewardConfig = field(default_factory=RewardConfig)
    rl: RlConfig
    domain_kl: tuple[DomainKl, ...] = ()
    init_from: str | None = None
    cold_start: ColdStartConfig | None = None
    mesh: MeshConfig = MeshConfig()
    seed: int = 0
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    distributed: bool = False

    def __post_init__(self) -> None:
        """Check the fields that must fit each other."""
        require(0 <= self.seed < 2**32, f"seed={self.seed} must be in [0, 2**32)")
        require(
            self.init_from is None or self.cold_start is None,
            "init_from and cold_start exclude each other: set cold_start=none to begin with init_from",
        )
        require(
            self.init_from is not None or self.cold_start is not None,
            "a policy to begin with is needed: init_from=DIR, a run's folder or a converted checkpoint, or cold_start",
        )
        worked, style = self.cold_start.worked if self.cold_start else 0.0, self.rewards.style
        require(
            worked == 0 or style in THINKING_STYLES,
            f"cold_start.worked={worked} needs rewards.style of {THINKING_STYLES}, not {style!r}",
        )
        require(
            self.agent is None or self.cold_start is None or worked > 0,
            "cold_start.worked=0 would show no call of the tools; set the share of examples that do, such as 1",
        )
        require(
            (self.tasks is None) != (self.agent is None),
            "exactly one of tasks and agent must be given",
        )
        require(
            self.agent is None or (not self.instruction and self.rewards == RewardConfig()),
            "instruction and rewards have no effect with agent: leave them as they are",
        )
        domains = [kl.domain for kl in self.domain_kl]
        require(len(set(domains)) == len(domains), f"domain_kl names a domain twice: {domains}")
        require(
            self.rewards.length is None or self.rewards.length.limit <= self.rl.rollouts.max_tokens,
            f"rewards.length.limit={self.rewards.length and self.rewards.length.limit} is beyond"
            f" rl.rollouts.max_tokens={self.rl.rollouts.max_tokens}: the whole penalty is never reached",
        )

    @property
    def kl_strength(self) -> dict[str, float]:
        """Domain -> strength."""
        return {kl.domain: kl.strength for kl in self.domain_kl}

    def cold_start_run(self, examples: str) -> RunConfig:
        """Return the cold start as a run of pre-training.

        Args:
            examples: The file of solved tasks.

        Returns:
            The run.

        Raises:
            ValueError: If the fields do not fit each other.
        """
        cold = self.cold_start
        assert cold is not None, "the run has no cold start"
        return RunConfig(
            model=self.model,
            data=DataConfig(
                sources=(Source(path=examples),),
                tokenizer=self.tokenizer,
                seq_len=cold.seq_len,
                batch_size=cold.batch_size,
                seed=self.seed,
                examples=cold.masked,
                heldout_fraction=0.0,
            ),
            dense=cold.dense,
            warmup=cold.warmup,
            sparse=cold.sparse,
            mesh=self.mesh,
            seed=self.seed,
            checkpoint=dataclasses.replace(self.checkpoint, keep_best=0),
            metrics=self.metrics,
        )

    def make_mesh(self) -> Mesh:
        """Lay out the learner's devices: all but those that rollouts have for themselves.

        Returns:
            The mesh.

        Raises:
            ValueError: If the sizes do not fit the devices, or rollouts can have none of their own.
        """
        devices, apart = jax.devices(), self.rl.rollouts.devices
        if not apart:
            return make_mesh(self.mesh)
        require(
            jax.process_count() == 1,
            f"rl.rollouts.devices={apart} needs one process that has all devices; with several set 0",
        )
        require(
            apart < len(devices),
            f"rl.rollouts.devices={apart} leaves none of {len(devices)} devices to the learner",
        )
        return make_mesh(self.mesh, devices[:-apart])

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Check that the mesh divides what it cuts.

        Args:
            mesh: The devices.

        Raises:
            ValueError: If an axis does not divide a size; names both.
        """
        check_model_on_mesh(self.model, mesh)
        learner = self.rl.learner
        check_rows(mesh, learner.rows, "rl.learner.rows")
        check_row_length(mesh, learner.row_length, "rl.learner.row_length")
