"""An evaluation as one value: which policies attempt which tasks, how often, and how their tokens are drawn."""

from dataclasses import dataclass, field
from typing import Literal

from dsv32_jax.config import Dtype, require
from dsv32_jax.generate.sampling import SamplingParams
from train.agents.context import ContextConfig, Strategy
from train.agents.endpoint import EndpointConfig
from train.agents.environment import Split
from train.agents.loop import Limits
from train.rl.problems import Family
from train.rl.rewards import RewardConfig
from train.rl.task_source import TaskFile

FormName = Literal["thinking", "chat", "compact", "plain"]
ContextName = Literal["none", "summary", "discard_75", "discard_all"]


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Who attempts the tasks.

    Attributes:
        name: In tables and files.
        place: A checkpoint, as `dsv32_jax.load_model` reads it, or the address of an endpoint.
        model: As an endpoint calls it; "" of a checkpoint.
    """

    name: str
    place: str
    model: str = ""

    def __post_init__(self) -> None:
        """Check that the place and the model fit each other."""
        require(bool(self.name and self.place), "a policy needs a name and a place")
        require(
            self.is_endpoint == bool(self.model),
            f"policy {self.place!r}: an endpoint, and nothing else, needs a model: write http://HOST/v1#MODEL",
        )

    @property
    def is_endpoint(self) -> bool:
        """Whether it answers at an address."""
        return self.place.startswith(("http://", "https://"))

    @classmethod
    def from_text(cls, text: str) -> "PolicyConfig":
        """Read a policy off a command line.

        Args:
            text: A checkpoint's folder, or `http://HOST/v1#MODEL`; `NAME=` before it names it, else the last part does.

        Returns:
            The policy.

        Raises:
            ValueError: If it is not written so.
        """
        name, equals, place = text.partition("=")
        if not equals or "/" in name:
            name, place = "", text
        model = ""
        if place.startswith(("http://", "https://")):
            place, _, model = place.partition("#")
        last = model or place.rstrip("/").rpartition("/")[2]
        return cls(name=name or last, place=place, model=model)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How checkpoints are run.

    Attributes:
        slots: Episodes at once.
        max_len: The window: tokens of a context.
        dtype: Of products; None takes the checkpoint's.
        dense: Attend to every earlier token, as before the sparse stage.
        tokenizer: In place of the checkpoint's own: "bytes", or a tokenizer.json or its folder.
        mesh: Spread model and cache over devices, such as "tensor=4,expert=2"; None is the first device.
    """

    slots: int = 32
    max_len: int = 4096
    dtype: Dtype | None = None
    dense: bool = False
    tokenizer: str | None = None
    mesh: str | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.slots >= 1, f"slots={self.slots} must be at least 1")
        require(self.max_len >= 2, f"max_len={self.max_len} must be at least 2")


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """How endpoints are asked; the fields are those of `EndpointConfig`.

    Attributes:
        api_key_env: Environment variable that holds the key; "" sends none.
        window: Tokens that the model's context holds, by which contexts are managed.
        concurrency: Episodes at once.
        attempts: Failures to bear on one request while others succeed.
        timeout_s: Seconds that a request may take.
        give_up_s: Seconds that an endpoint may be down before the evaluation stops; None waits without end.
    """

    api_key_env: str = ""
    window: int = 131_072
    concurrency: int = 8
    attempts: int = 3
    timeout_s: float = 600.0
    give_up_s: float | None = 600.0

    def of(self, policy: PolicyConfig) -> EndpointConfig:
        """Return how a policy's endpoint is asked."""
        return EndpointConfig(
            base_url=policy.place,
            model=policy.model,
            api_key_env=self.api_key_env,
            window=self.window,
            concurrency=self.concurrency,
            attempts=self.attempts,
            timeout_s=self.timeout_s,
            give_up_s=self.give_up_s,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """An evaluation.

    Attributes:
        policies: Who attempts; several are also rated against each other.
        families: Generators of reasoning-gym.
        files: Tasks of one's own, as `train.rl.tasks` reads them.
        environments: Of agents, by name, or `FILE.py:NAME`, a function without arguments that returns an `Environment`.
        split: "held_out", or "train".
        held_out_fraction: The share of a file's questions that training held out; 1 where it was not trained on.
        tasks: Of each family, file and environment; of a family that was trained on no more than were held out then,
            or the others may have been seen.
        samples: Attempts at each task.
        ks: Of pass@k, each at most `samples`.
        parallel: Independent runs that make an attempt, of which the one with the fewest steps counts; 1 is one run.
        form: How checkpoints are written to: the official format with or without thinking, "compact" for small models
            with tools, "plain" for those that know no messages. Endpoints have their own.
        instruction: Put behind each question of families and files.
        temperature: Divides the logits.
        top_p: Keep the smallest set of most likely tokens with this probability.
        top_k: Keep this many; 0 keeps all.
        seed: Of all draws, together with the task and the attempt.
        limits: What an episode may take.
        context: What happens as the window fills.
        context_share: Of the window, beyond which it does.
        engine: How checkpoints are run.
        endpoint: How endpoints are asked.
        rewards: How answers to families and files are judged; they come without reasoning, so in style "chat", which
            knows tags and boxes and else takes all, or another but "thinking".
        tool_threads: Threads that call a checkpoint's tools while it draws for other episodes; with 0 tools are called
            in between, so that the same evaluation again is the same to the bit on one machine.
    """

    policies: tuple[PolicyConfig, ...] = ()
    families: tuple[Family, ...] = ()
    files: tuple[TaskFile, ...] = ()
    environments: tuple[str, ...] = ()
    split: Split = "held_out"
    held_out_fraction: float = 1.0
    tasks: int = 32
    samples: int = 4
    ks: tuple[int, ...] = (1,)
    parallel: int = 1
    form: FormName = "thinking"
    instruction: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    limits: Limits = Limits()
    context: ContextName = "none"
    context_share: float = 0.8
    engine: EngineSettings = EngineSettings()
    endpoint: EndpointSettings = EndpointSettings()
    rewards: RewardConfig = field(
        default_factory=lambda: RewardConfig(style="chat", max_fault_share=1.0)
    )
    tool_threads: int = 0

    def __post_init__(self) -> None:
        """Check ranges, and what must fit each other."""
        for name, least in (("tasks", 1), ("samples", 1), ("parallel", 1), ("tool_threads", 0)):
            value = getattr(self, name)
            require(value >= least, f"{name}={value} must be at least {least}")
        share = self.held_out_fraction
        require(0 < share <= 1, f"held_out_fraction={share} must be in (0, 1]")
        wrong = [k for k in self.ks if not 1 <= k <= self.samples]
        require(not wrong, f"ks={self.ks}: each must be in [1, samples={self.samples}]")
        names = [policy.name for policy in self.policies]
        require(
            len(set(names)) == len(names),
            f"policies share names: {', '.join(names)}; write NAME=PLACE",
        )
        require(
            self.temperature > 0,
            "temperature=0 draws the same every time; an evaluation is of the policy that is sampled",
        )
        require(
            self.rewards.style != "thinking",
            "rewards.style=thinking: answers are judged without their reasoning; set chat",
        )
        for policy in self.policies:
            require(
                not (policy.is_endpoint and self.top_k),
                f"top_k={self.top_k} is not sent to endpoints, of which {policy.name} is one",
            )
            if policy.is_endpoint:
                self.endpoint.of(policy)
        self.params(seed=0)
        self.managed  # noqa: B018  # checks the share

    @property
    def managed(self) -> ContextConfig | None:
        """How contexts are managed; None for not at all."""
        strategy: Strategy | None = None if self.context == "none" else self.context
        return strategy and ContextConfig(strategy=strategy, share=self.context_share)

    def params(self, *, seed: int) -> SamplingParams:
        """Return how an episode's tokens are drawn."""
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=seed
        )
