"""Stand-in for what `dsv32_jax.generate.__main__` and `load_model` are about to have; goes when they do."""

import argparse
import json
import typing
from pathlib import Path

from dsv32_jax.cache import CacheConfig, CacheDtype
from dsv32_jax.config import Dtype
from dsv32_jax.encoding import blocks
from dsv32_jax.generate.protocol import EngineConfig
from dsv32_jax.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer

PAGE_SIZE = 64


def load_tokenizer_of(path: Path, override: str | None = None) -> Tokenizer:
    """Load the tokenizer that goes with a checkpoint.

    Args:
        path: As for `load_model`.
        override: "bytes", or the path of a tokenizer.json or of its folder, to use instead.

    Returns:
        The tokenizer.

    Raises:
        FileNotFoundError: If there is none.
    """
    if override is not None:
        return load_tokenizer(override)
    if not path.exists():
        raise FileNotFoundError(f"no folder {path}")
    if (path / TOKENIZER_FILE).is_file():
        return load_tokenizer(str(path))
    for run in (path, *path.absolute().parents[:2]):
        if (run / "config.json").is_file():
            named = json.loads((run / "config.json").read_text()).get("data", {}).get("tokenizer")
            if named:
                return load_tokenizer(named)
    raise FileNotFoundError(f"{path} names no tokenizer; give one with --tokenizer")


def tools_block_of(checkpoint: Path, override: Path | None) -> str | None:
    """Return the text that describes tools to a checkpoint's model.

    Args:
        checkpoint: A folder; its `encoding/` is read if it is there.
        override: A file or folder to read instead.

    Returns:
        The block; None for this project's own wording.

    Raises:
        FileNotFoundError: If `override` does not exist.
        EncodingError: If what is read is not the official block.
    """
    if override is not None:
        return blocks.read_tools_block(override)
    folder = checkpoint / "encoding"
    return blocks.read_tools_block(folder) if folder.is_dir() else None


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a model is loaded and run.

    Args:
        parser: The command's parser.
    """
    add = parser.add_argument
    add("--tokenizer", help='"bytes", or a tokenizer.json or its folder')
    add("--dtype", choices=typing.get_args(Dtype), default="bfloat16")
    add("--max-len", type=int, default=4096, help="longest text, prompt included (4096)")
    add("--cache-dtype", choices=typing.get_args(CacheDtype), default="model")
    add("--cache-tokens", type=int, help="tokens that the cache holds for all texts together")
    add("--slots", type=int, default=8, help="texts drawn at once (8)")
    add("--prefill-chunk", type=int, default=256, help="tokens of a prompt run at once (256)")
    add("--speculative", action="store_true", help="let the MTP module draft tokens")
    add("--dense", action="store_true", help="attend to every earlier token")


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
