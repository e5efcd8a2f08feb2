"""Architecture of a DeepSeek-V3.2 model as nested frozen dataclasses, and the named presets."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from pallas_kernels import dispatch

Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "full"]
Kernels = Literal["auto", "fp8", "reference"]
ExpertDispatch = Literal["auto", "ragged", "all_to_all", "all_gather"]


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """Rotary frequencies with YaRN; `factor=1` is plain RoPE.

    Attributes:
        theta: Base of the frequencies.
        factor: Context extension, >= 1.
        original_len: Positions the base model was trained on.
        beta_fast: Rotations over original_len above which a frequency is kept.
        beta_slow: Rotations below which it is divided by `factor`.
        mscale: Numerator of the amplitude on cos and sin; 0 means not given.
        mscale_all_dim: Its denominator, and the factor on the softmax scale; 0 means not given.
    """

    theta: float = 10000.0
    factor: float = 40.0
    original_len: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.theta > 1, f"theta={self.theta} must be above 1")
        require(self.factor >= 1, f"factor={self.factor} must be at least 1")
        require(self.original_len >= 1, f"original_len={self.original_len} must be at least 1")
        require(
            self.beta_fast >= self.beta_slow > 0,
            f"beta_fast={self.beta_fast} must be at least beta_slow={self.beta_slow} and both positive",
        )

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin; 1 for the official settings, where the two mscales are equal."""
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def softmax_factor(self) -> float:
        """Factor on the attention's softmax scale: m^2, or 1 where mscale_all_dim is not given."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention.

    Attributes:
        n_heads: Query heads.
        q_lora_rank: Width of the query latent, which the indexer reads too.
        kv_lora_rank: Width of the key-value latent.
        nope_dim: Per-head dims without rotation.
        rope_dim: Per-head dims with rotation; the rope key is shared by all heads.
        v_dim: Per-head value dims.
        fp8_latent: Round the latent to e4m3 with power-of-two scales, as the production cache stores it.
        masked_max_len: Sparse attention over at most this many keys runs as masked dense attention in MHA
            form; longer ones gather the selected rows in absorbed MQA form. The two are equal to rounding. None takes
            what suits the device and the released model, see `mla.masked_up_to`.
    """

    n_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    fp8_latent: bool = False
    masked_max_len: int | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("n_heads", "q_lora_rank", "kv_lora_rank", "nope_dim", "v_dim"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        require(
            self.rope_dim >= 2 and self.rope_dim % 2 == 0,
            f"rope_dim={self.rope_dim} must be even and positive",
        )
        require(
            self.masked_max_len is None or self.masked_max_len >= 0,
            f"masked_max_len={self.masked_max_len} must not be negative",
        )
        if self.fp8_latent:
            require(
                self.kv_lora_rank % 128 == 0 or self.kv_lora_rank < 128,
                f"fp8_latent needs kv_lora_rank={self.kv_lora_rank} to be a multiple of 128 or below it",
            )

    @property
    def qk_dim(self) -> int:
        """Per-head dims of a query."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Lightning indexer and the selection it makes.

    Attributes:
        n_heads: Indexer heads.
        head_dim: Dims per head; the first `rope_dim` of them rotate.
        topk: Keys each query attends to.
        hadamard: Rotate q and k by the Hadamard matrix (orthonormal: shapes only the FP8 error).
        fp8: Round q and k to e4m3 with power-of-two scales, as the production cache stores the keys.
    """

    n_heads: int
    head_dim: int
    topk: int
    hadamard: bool = True
    fp8: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("n_heads", "head_dim", "topk"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        if self.hadamard:
            require(
                self.head_dim & (self.head_dim - 1) == 0,
                f"hadamard needs head_dim={self.head_dim} to be a power of two",
            )
        if self.fp8:
            require(
                self.head_dim % 128 == 0 or self.head_dim < 128,
                f"fp8 needs head_dim={self.head_dim} to be a multiple of 128 or below it",
            )


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts with a shared expert.

    Attributes:
        n_experts: Routed experts.
        n_active: Routed experts per token.
        n_groups: Groups of consecutive experts.
        n_active_groups: Groups a token may choose from.
        expert_dim: Hidden width of one expert.
        n_shared: Shared experts, run as one of width `n_shared * expert_dim`.
        route_scale: Factor on the normalised gates.
        normalize_gates: Divide the gates by their sum.
    """

    n_experts: int
    n_active: int
    n_groups: int
    n_active_groups: int
    expert_dim: int
    n_shared: int = 1
    route_scale: float = 2.5
    normalize_gates: bool = True

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in (
            "n_experts",
            "n_active",
            "n_groups",
            "n_active_groups",
            "expert_dim",
            "n_shared",
        ):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        require(
            self.n_experts % self.n_groups == 0,
            f"n_groups={self.n_groups} must divide n_experts={self.n_experts}",
        )
        require(
            self.n_active_groups <= self.n_groups,
            f"n_active_groups={self.n_active_groups} must be at most n_groups={self.n_groups}",
        )
        require(
            self.n_groups == 1 or self.group_size >= 2,
            f"n_groups={self.n_groups} leaves fewer than 2 of n_experts={self.n_experts} in a group",
        )
        require(
            self.n_active <= self.n_active_groups * self.group_size,
            f"n_active={self.n_active} must be at most the {self.n_active_groups * self.group_size} "
            "experts of the active groups",
        )

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.n_experts // self.n_groups


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A DeepSeek-V3.2 model.

    Attributes:
        vocab_size: Rows of the embedding and columns of the head.
        dim: Width of the residual stream.
        n_layers: Main layers, without the MTP layer.
        n_dense_layers: Leading layers with a plain feed-forward.
        ffn_dim: Hidden width of the plain feed-forward.
        mla: Attention.
        indexer: Sparse selection.
        moe: Experts.
        rope: Rotary frequencies.
        mtp: Add the multi-token-prediction module.
        norm_eps: Epsilon of the RMSNorms of the residual stream.
        init_std: Standard deviation of the weights' normal initialisation.
        dtype: Dtype of activations and matrix products; parameters are kept in float32.
        remat: What the backward pass recomputes in each layer: nothing, all but matrix products, everything.
        scan_unroll: Layers per step of the scan over stacked layers; more compiles longer and may run faster.
        kernels: What runs attention, selection and experts. "auto": the best kernel for the device and shapes, none of
            which changes the selected set. "fp8": the same, but keys of whole sequences are scored by FP8 products,
            faster; tensor cores add them with few bits, so about 1 key of 10,000 is another. "reference": the plain-jnp
            definitions, which run anywhere.
        expert_dispatch: How tokens come to experts on other devices. "ragged": each is sent once to every device that
            holds one of its experts, by ragged all-to-all (GPU, TPU). "all_to_all": the same by a plain one, filled up,
            which runs anywhere. "all_gather": every device gets all tokens of the expert axis. "auto": the first, or
            the second, but the third on a short axis and for few tokens. Nothing is dropped and all are equal to
            rounding.
        deterministic: Sum the gradients of keys that many queries list in an order that never changes, where a kernel
            would take the order in which they come; slower. Off, a resumed run on a GPU equals one that went on to
            rounding only.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_dense_layers: int
    ffn_dim: int
    mla: MLAConfig
    indexer: IndexerConfig
    moe: MoEConfig
    rope: YarnConfig = YarnConfig()
    mtp: bool = True
    norm_eps: float = 1e-6
    init_std: float = 0.006
    dtype: Dtype = "float32"
    remat: Remat = "none"
    scan_unroll: int = 1
    kernels: Kernels = "auto"
    expert_dispatch: ExpertDispatch = "auto"
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Check ranges and the fields that must fit each other."""
        for name in ("vocab_size", "dim", "n_layers", "ffn_dim", "scan_unroll"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        require(
            0 <= self.n_dense_layers <= self.n_layers,
            f"n_dense_layers={self.n_dense_layers} must be in [0, n_layers={self.n_layers}]",
        )
        require(
            self.mla.rope_dim <= self.indexer.head_dim,
            f"indexer.head_dim={self.indexer.head_dim} must be at least mla.rope_dim={self.mla.rope_dim}",
        )
        require(
            self.kernels != "fp8" or self.indexer.fp8,
            "kernels=fp8 needs indexer.fp8=true: it multiplies the FP8 values that the indexer rounds to",
        )
        require(self.norm_eps > 0, f"norm_eps={self.norm_eps} must be positive")
        require(self.init_std > 0, f"init_std={self.init_std} must be positive")

    @property
    def n_moe_layers(self) -> int:
        """Main layers with experts."""
        return self.n_layers - self.n_dense_layers

    @property
    def implementation(self) -> str | None:
        """The `implementation` argument of every op but the one below."""
        return "reference" if self.kernels == "reference" else None

    @property
    def selection_implementation(self) -> str | None:
        """The `implementation` argument of the ops that select keys of whole sequences."""
        if self.kernels != "fp8":
            return self.implementation
        return "pallas_tpu_fp8" if dispatch.platform() == "tpu" else "pallas_gpu_fp8"

    @property
    def softmax_scale(self) -> float:
        """Factor on the attention's logits: qk_dim^-0.5 times YaRN's m^2."""
        return self.mla.qk_dim**-0.5 * self.rope.softmax_factor


def v32_671b() -> ModelConfig:
    """Return the released model. Source: deepseek-ai/DeepSeek-V3.2 config.json."""
    return ModelConfig(
        vocab_size=129280,
        dim=7168,
        n_layers=61,
        n_dense_layers=3,
        ffn_dim=18432,
        mla=MLAConfig(
            n_heads=128, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128
        ),
        indexer=IndexerConfig(n_heads=64, head_dim=128, topk=2048),
        moe=MoEConfig(n_experts=256, n_active=8, n_groups=8, n_active_groups=4, expert_dim=2048),
        dtype="bfloat16",
        remat="full",
    )


def v32_16b() -> ModelConfig:
    """Return a model of about 16B parameters, the shape of DeepSeek-V2-Lite with DSA and MTP."""
    return ModelConfig(
        vocab_size=102400,
        dim=2048,
        n_layers=27,
        n_dense_layers=1,
        ffn_dim=10944,
        mla=MLAConfig(
            n_heads=16, q_lora_rank=768, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128
        ),
        indexer=IndexerConfig(n_heads=16, head_dim=128, topk=2048),
        moe=MoEConfig(
            n_experts=64, n_active=6, n_groups=1, n_active_groups=1, expert_dim=1408, n_shared=2
        ),
        dtype="bfloat16",
        remat="full",
    )


def v32_1b() -> ModelConfig:
    """Return a model of about 1B parameters for one accelerator."""
    return ModelConfig(
        vocab_size=32768,
        dim=1024,
        n_layers=16,
        n_dense_layers=1,
        ffn_dim=4096,
        mla=MLAConfig(
            n_heads=16, q_lora_rank=512, kv_lora_rank=256, nope_dim=64, rope_dim=32, v_dim=64
        ),
        indexer=IndexerConfig(n_heads=8, head_dim=64, topk=1024),
        moe=MoEConfig(n_experts=32, n_active=4, n_groups=4, n_active_groups=2, expert_dim=512),
        init_std=0.02,
        dtype="bfloat16",
        remat="full",
    )


def gpu_100m() -> ModelConfig:
    """Return a byte-level model of about 100M parameters, for minutes on one GPU."""
    return ModelConfig(
        vocab_size=320,
        dim=512,
        n_layers=10,
        n_dense_layers=1,
        ffn_dim=2048,
        mla=MLAConfig(
            n_heads=8, q_lora_rank=256, kv_lora_rank=128, nope_dim=64, rope_dim=32, v_dim=64
        ),
        indexer=IndexerConfig(n_heads=8, head_dim=64, topk=128),
        moe=MoEConfig(n_experts=16, n_active=2, n_groups=4, n_active_groups=2, expert_dim=384),
        rope=YarnConfig(factor=4.0, original_len=1024),
        init_std=0.02,
        dtype="bfloat16",
    )


def cpu_1m() -> ModelConfig:
    """Return a byte-level model of about 0.9M parameters, 1.2M with the MTP module, for minutes on two CPU cores."""
    return ModelConfig(
        vocab_size=264,
        dim=128,
        n_layers=3,
        n_dense_layers=1,
        ffn_dim=256,
        mla=MLAConfig(
            n_heads=4, q_lora_rank=64, kv_lora_rank=64, nope_dim=32, rope_dim=16, v_dim=32
        ),
        indexer=IndexerConfig(n_heads=8, head_dim=32, topk=16),
        moe=MoEConfig(n_experts=8, n_active=2, n_groups=4, n_active_groups=2, expert_dim=64),
        rope=YarnConfig(factor=4.0, original_len=128),
        init_std=0.02,
    )


def tiny() -> ModelConfig:
    """Return the smallest model with every part, for tests and quick looks."""
    base = cpu_1m()
    return replace(
        base,
        vocab_size=97,
        dim=32,
        n_layers=3,
        ffn_dim=48,
        mla=MLAConfig(n_heads=2, q_lora_rank=24, kv_lora_rank=16, nope_dim=8, rope_dim=8, v_dim=12),
        indexer=IndexerConfig(n_heads=16, head_dim=16, topk=8),
        moe=replace(base.moe, expert_dim=24),
        rope=YarnConfig(factor=4.0, original_len=16),
        init_std=0.1,
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "v32_671b": v32_671b,
    "v32_16b": v32_16b,
    "v32_1b": v32_1b,
    "gpu_100m": gpu_100m,
    "cpu_1m": cpu_1m,
    "tiny": tiny,
}
