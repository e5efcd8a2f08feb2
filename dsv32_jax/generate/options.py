"""The options that say how a model is loaded and run, shared by the commands that generate."""

import argparse
import logging
import typing

import jax

from dsv32_jax import errors, load_model, sharding, tokenizer
from dsv32_jax.cache import CacheConfig, CacheDtype
from dsv32_jax.config import Dtype
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig

logger = logging.getLogger(__name__)

PAGE_SIZE = 64


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a model is loaded and run.

    Args:
        parser: The command's parser.
    """
    parser.add_argument(
        "--tokenizer",
        help='"bytes", or a tokenizer.json or its folder (default: the one the checkpoint names or holds)',
    )
    parser.add_argument(
        "--dtype",
        choices=typing.get_args(Dtype),
        help="of activations and matrix products (default: the one the checkpoint names)",
    )
    parser.add_argument(
        "--max-len", type=int, default=4096, help="longest text, prompt included (4096)"
    )
    parser.add_argument(
        "--cache-dtype",
        choices=typing.get_args(CacheDtype),
        default="model",
        help='of the cache: "model" is --dtype; "fp8" the 656 + 132 byte records (model)',
    )
    parser.add_argument(
        "--cache-tokens",
        type=int,
        help="tokens that the cache holds for all texts together (default: as many as all slots may need)",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        help="spread model and cache over devices, such as tensor=4,expert=2 (default: the first device)",
    )
    parser.add_argument("--slots", type=int, default=8, help="texts drawn at once (8)")
    parser.add_argument(
        "--prefill-chunk", type=int, default=256, help="tokens of a prompt run at once (256)"
    )
    parser.add_argument(
        "--speculative", action="store_true", help="let the MTP module draft tokens"
    )
    parser.add_argument(
        "--dense",
        action="store_true",
        help="attend to every earlier token, as before the sparse stage",
    )


def engine_config(args: argparse.Namespace, *, slots: int, max_waiting: int) -> EngineConfig:
    """Read the options of `add_engine_options`.

    Args:
        args: Parsed options.
        slots: Texts drawn at once.
        max_waiting: Requests that may wait.

    Returns:
        The config.

    Raises:
        ValueError: If an option is out of range.
    """
    per_slot = -(-(args.max_len + 1) // PAGE_SIZE)
    tokens = args.cache_tokens
    n_pages = slots * per_slot if tokens is None else -(-tokens // PAGE_SIZE)
    return EngineConfig(
        n_slots=slots,
        max_len=args.max_len,
        prefill_chunk=args.prefill_chunk,
        max_waiting=max_waiting,
        cache=CacheConfig(n_pages=max(n_pages, 1), page_size=PAGE_SIZE, dtype=args.cache_dtype),
        mode="dense" if args.dense else "sparse",
        speculative=args.speculative,
    )


def load_engine(args: argparse.Namespace, cfg: EngineConfig, words: tokenizer.Tokenizer) -> Engine:
    """Load the model that the options of `add_engine_options` name, onto the mesh that they name.

    Args:
        args: Parsed options, with `checkpoint`.
        cfg: How to run it.
        words: Its tokenizer.

    Returns:
        The engine.

    Raises:
        ValueError: If the mesh does not fit the devices or the batch.
        UsageError: If the tokenizer has more tokens than the model.
        WorkFailedError: If the cache does not fit into memory.
    """
    mesh = None if args.mesh is None else sharding.make_mesh(sharding.parse_mesh(args.mesh))
    logger.info("loading %s", args.checkpoint)
    dtype = args.dtype or load_model.saved_dtype(args.checkpoint)
    model = load_model.load_model(args.checkpoint, dtype, mesh=mesh, narrow=True)
    if words.vocab_size > model.cfg.vocab_size:
        raise errors.UsageError(
            f"the tokenizer has {words.vocab_size} tokens, the model {model.cfg.vocab_size}"
        )
    try:
        return Engine(model, cfg, eos_id=words.eos_id, mesh=mesh)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        n_tokens = cfg.cache.n_pages * cfg.cache.page_size
        raise errors.WorkFailedError(
            f"a cache of {n_tokens} tokens does not fit into memory beside the model; see --cache-tokens"
        ) from error
