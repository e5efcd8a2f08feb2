"""How a policy samples and learns: the parts of a GRPO run's config."""

from dataclasses import dataclass
from typing import Literal

from dsv32_jax.cache import CacheDtype
from dsv32_jax.config import require
from dsv32_jax.generate.sampling import SamplingParams
from dsv32_jax.sharding import MeshConfig
from train.optimizer import OptimizerConfig
from train.rl.objective import ObjectiveConfig
from train.stage import Stage

RatioAgainst = Literal["sampler", "learner"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What is drawn for each step.

    Attributes:
        prompts: Prompts a step.
        group_size: Responses to each.
        temperature: Divides the logits.
        top_p: Keep the smallest set of most likely tokens with this probability.
        top_k: Keep this many; 0 keeps all.
        max_prompt_tokens: Longest prompt; a longer one is passed over and counted.
        max_tokens: Longest response.
        slots: Responses drawn at once.
        page_size: Tokens of a page of the cache.
        cache_dtype: "fp8" draws from a smaller cache, which the learner does not have: log-probabilities then differ,
            and the gate must allow it.
        staleness: Steps that pass between drawing responses and learning from them; 0 is none.
        overlap: Draw the next responses while the learner learns; needs staleness. Weights are then copied when they
            are pushed. What is learned is the same as without.
        devices: Devices of their own, the last ones of a process that has all; 0 shares the learner's. Without
            `overlap` one side waits for the other.
        mesh: Layout of the devices that draw; None takes the learner's.
        rounds: Draw more prompts, up to this many rounds, until the step has `prompts` groups whose rewards differ; 1
            takes groups as they come, those with equal rewards too.
    """

    prompts: int
    group_size: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_prompt_tokens: int
    max_tokens: int
    slots: int = 64
    page_size: int = 16
    cache_dtype: CacheDtype = "model"
    staleness: int = 0
    overlap: bool = False
    devices: int = 0
    mesh: MeshConfig | None = None
    rounds: int = 1

    def __post_init__(self) -> None:
        """Check ranges."""
        for name, least in (
            ("prompts", 1), ("group_size", 2), ("max_prompt_tokens", 1), ("max_tokens", 1),
            ("slots", 1), ("page_size", 1), ("staleness", 0), ("devices", 0), ("rounds", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            require(value >= least, f"{name}={value} must be at least {least}")
        require(
            self.temperature > 0, f"temperature={self.temperature} must be positive to learn from"
        )
        require(
            self.staleness > 0 or not self.overlap,
            "overlap=true needs staleness of at least 1: there is nothing to learn from while responses are drawn",
        )
        self.params(seed=0)

    @property
    def cuts(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def max_len(self) -> int:
        """Longest prompt and response together."""
        return self.max_prompt_tokens + self.max_tokens

    def params(self, *, seed: int) -> SamplingParams:
        """Return how one response is drawn."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed,
            max_tokens=self.max_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How a step learns.

    Attributes:
        objective: What is maximised.
        optimizer: Learning rate of the main model, and AdamW. With one of the indexers too they train by their KL as in
            the sparse stage; without it they stay as they are, bit for bit, and have no moments.
        indexer_kl: Factor on that KL, a mean over the tokens of prompts and responses, summed over layers; unused where
            the indexers stay as they are.
        minibatches: Optimizer steps that a step's groups are dealt out to.
        rows: Rows of a microbatch.
        row_length: Tokens of a row, at least the longest prompt and response.
        ratio_against: The ratio's denominator: the sampler's own log-probabilities, or the learner's before the step's
            first update.
        keep_routing: Replay the sampler's experts.
        keep_sampling_mask: Normalise over the tokens that the sampler kept.
        reference_every: Steps after which the policy becomes the reference; None keeps the first.
    """

    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    indexer_kl: float = 1.0
    minibatches: int = 1
    rows: int
    row_length: int
    ratio_against: RatioAgainst = "sampler"
    keep_routing: bool = True
    keep_sampling_mask: bool = True
    reference_every: int | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("minibatches", "rows", "row_length"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        every = self.reference_every
        require(every is None or every >= 1, f"reference_every={every} must be at least 1, or None")
        require(
            self.optimizer.main is not None,
            "learner.optimizer.main must be given: the policy trains",
        )
        require(self.indexer_kl > 0, f"indexer_kl={self.indexer_kl} must be positive")

    @property
    def stage(self) -> Stage:
        """What trains."""
        return "rl" if self.optimizer.indexer is None else "rl_indexer"


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """The comparison of sampler and learner before a run goes on.

    Attributes:
        prompts: Prompts whose responses are compared.
        tolerance: Nats by which a token's log-probabilities may differ.
        share: Of the tokens, that may differ by more: rounding may flip a key at the edge of the selection.
        selection: Also count the keys that the learner selects otherwise than the sampler, on a second response to each
            prompt, unless the top-k covers them all. For as long the sampler's cache keeps every selection, see
            `CacheConfig.keep_selection`, and each is copied to the host; its steps are compiled once more. So only
            here, at a run's start and where it is resumed: in training steps a difference shows in the ratio.
    """

    prompts: int
    tolerance: float
    share: float = 0.0
    selection: bool = True

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.prompts >= 1, f"prompts={self.prompts} must be at least 1")
        require(self.tolerance > 0, f"tolerance={self.tolerance} must be positive")
        require(0 <= self.share < 1, f"share={self.share} must be in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """A run of reinforcement learning.

    Attributes:
        steps: Steps.
        rollouts: How responses are drawn.
        learner: How it learns from them.
        gate: What is compared first.
        evaluate_every: Steps between evaluations on the held-out tasks; the first and the last step have one too.
        evaluate_tasks: Held-out tasks.
        samples_every: Steps between examples that are written down.
    """

    steps: int
    rollouts: RolloutConfig
    learner: LearnerConfig
    gate: GateConfig
    evaluate_every: int
    evaluate_tasks: int
    samples_every: int = 10

    def __post_init__(self) -> None:
        """Check ranges, and what must fit each other."""
        for name in ("steps", "evaluate_every", "evaluate_tasks", "samples_every"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        longest = self.rollouts.max_len
        require(
            self.learner.row_length >= longest,
            f"learner.row_length={self.learner.row_length} must hold the longest prompt and response, {longest}",
        )
        require(
            self.learner.keep_sampling_mask or not self.rollouts.cuts or self.gate.share > 0,
            "learner.keep_sampling_mask=false with top_p or top_k cannot agree with the sampler: set gate.share",
        )
        late = self.learner.minibatches > 1 or self.rollouts.staleness > 0
        require(
            late or self.learner.objective.off_policy_delta is None,
            "learner.objective.off_policy_delta has no effect where every response is learned from once and at once:"
            " set it to None, or set minibatches or staleness",
        )
