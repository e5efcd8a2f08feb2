"""Command: convert official safetensors to a sharded Orbax checkpoint, and back."""

import argparse
import logging
import sys
import typing
from collections.abc import Sequence

import jax

from dsv32_jax import command_line, errors, joining
from dsv32_jax.convert import from_hf, storage, to_hf
from dsv32_jax.convert.from_hf import Figures
from dsv32_jax.convert.slots import StoredDtype
from dsv32_jax.convert.workers import Workers

logger = logging.getLogger("dsv32_jax.convert")  # __name__ ends in __main__ here

NAME = "python -m dsv32_jax.convert"
FROM_HF, TO_HF = "from-hf", "to-hf"
PLACE = ("--coordinator", "--process-count", "--process-index")
MAX_SHARD_GB = 2**20  # a pebibyte
RESUMING = "An interrupted conversion goes on when the same command is given again; a finished one is checked."
SUMMARY = f"""Convert weights between the official layout and checkpoints of this project.

  {FROM_HF} SRC DST   official safetensors -> sharded Orbax checkpoint
  {TO_HF} SRC DST     training run or converted checkpoint -> official safetensors

{RESUMING} See `{NAME} {FROM_HF} --help`."""
EXAMPLES = f"""
{NAME} {FROM_HF} DeepSeek-V3.2 checkpoints/v32
{NAME} {TO_HF} runs/sparse exported --dtype fp8
"""
FROM_SUMMARY = f"""Convert an official folder (FP8, bf16 or float32; DeepSeek-V3.2, or DeepSeek-V3 and V3.1, which get
new indexers) to a checkpoint that every command here reads and training can start from (init_from=DST).
{RESUMING}"""
FROM_EXAMPLES = f"""
{NAME} {FROM_HF} DeepSeek-V3.2 checkpoints/v32
{NAME} {FROM_HF} DeepSeek-V3.2 gs://bucket/v32 --dtype bf16 --threads 32
{NAME} {FROM_HF} DeepSeek-V3.1-Base checkpoints/v31 --index-topk 2048 --seed 1
{NAME} {FROM_HF} DeepSeek-V3.2 /shared/v32 --coordinator host0:1234 --process-count 4 --process-index 2
"""
TO_SUMMARY = f"""Convert a training run or a converted checkpoint to the official layout, which DeepSeek's own loader,
transformers, vLLM and SGLang read.
{RESUMING}"""
TO_EXAMPLES = f"""
{NAME} {TO_HF} checkpoints/v32 exported
{NAME} {TO_HF} runs/sparse exported --dtype fp8
{NAME} {TO_HF} runs/sparse/checkpoints/500 exported --dtype bf16 --official DeepSeek-V3.2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; those of this process by default.

    Returns:
        Exit status: 0 done, 1 the conversion failed, 2 wrong usage or a source that cannot be converted.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    with (
        command_line.Boundary() as boundary,
        command_line.logging_to_stderr(),
        command_line.sigterm_raises(),
    ):
        parser = command_line.Parser(name=NAME, summary=SUMMARY, examples=EXAMPLES)
        parser.add_argument("direction", choices=[FROM_HF, TO_HF])
        if parser.first_word(given, "direction", [FROM_HF, TO_HF]) == FROM_HF:
            _run_from_hf(_from_parser().parse_args(given[1:]), boundary)
        else:
            _run_to_hf(_to_parser().parse_args(given[1:]), boundary)
    return boundary.status


def _run_from_hf(args: argparse.Namespace, boundary: command_line.Boundary) -> None:
    team = _workers(args)
    options = from_hf.Options(
        dtype=args.dtype,
        index_heads=args.index_heads,
        index_head_dim=args.index_head_dim,
        index_topk=args.index_topk,
        seed=args.seed,
    )
    job = from_hf.check(storage.as_path(args.source), storage.as_path(args.target), options)
    _check_apart(args)
    drawn = len(job.layout.table) - len(job.found)
    if drawn:
        logger.info("the source has no indexers: %d tensors are drawn, seed %d", drawn, args.seed)
    if (loss := from_hf.rounding(job)) is not None:
        logger.info("%s", loss)
    boundary.started = True
    done_before = "was converted before and is whole"
    _report(from_hf.convert(job, team), args, str(job.identity["dtype"]), done_before)


def _run_to_hf(args: argparse.Namespace, boundary: command_line.Boundary) -> None:
    team = _workers(args)
    official = None if args.official is None else storage.as_path(args.official)
    options = to_hf.Options(dtype=args.dtype, shard_gb=args.shard_gb, official=official)
    job = to_hf.check(storage.as_path(args.source), storage.as_path(args.target), options)
    _check_apart(args)
    boundary.started = True
    done_before = "was converted before and its headers agree, weights were not read again"
    _report(to_hf.convert(job, team), args, str(job.identity["dtype"]), done_before)


def _check_apart(args: argparse.Namespace) -> None:
    source, target = (storage.real_path(path) for path in (args.source, args.target))
    if source == target or source in target.parents or target in source.parents:
        raise errors.UsageError("SRC and DST must be folders of their own, none inside the other")


def _report(figures: Figures, args: argparse.Namespace, dtype: str, done_before: str) -> None:
    if command_line.process_index():
        return
    size = f"{figures.tensors} tensors as {dtype}, {figures.bytes / 1e9:.2f} GB"
    if figures.resumed and not figures.seconds:
        line = f"{args.target} {done_before}: {size}"
    else:
        seconds = max(figures.seconds, 1e-9)
        rate = figures.bytes / seconds / 1e9
        speed = "" if figures.resumed else f" ({rate:.2f} GB/s)"
        line = f"converted and verified {size} in {seconds:.0f} s{speed}: {args.target}"
    sys.stdout.write(line + "\n")


def _workers(args: argparse.Namespace) -> Workers:
    """Join the other processes, where there are any."""
    given = (args.coordinator, args.process_count, args.process_index)
    texts = {
        option: str(value) for option, value in zip(PLACE, given, strict=True) if value is not None
    }
    place = joining.read_place(texts, PLACE)
    if args.distributed or place is not None:
        joining.join(place)
        count, index = jax.process_count(), jax.process_index()
        return Workers(threads=args.threads, process_count=count, process_index=index)
    return Workers(threads=args.threads)


def _from_parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        name=f"{NAME} {FROM_HF}", summary=FROM_SUMMARY, examples=FROM_EXAMPLES
    )
    default = from_hf.Options()
    _add_folders(parser, "an official folder", "the checkpoint to make")
    parser.add_argument(
        "--dtype",
        choices=typing.get_args(StoredDtype),
        help="of the weights: fp8 keeps or makes blocks with scales (default: what SRC has)",
    )
    parser.add_argument(
        "--index-heads", type=_count, default=default.index_heads, help="of new indexers"
    )
    parser.add_argument(
        "--index-head-dim", type=_count, default=default.index_head_dim, help="of new indexers"
    )
    parser.add_argument(
        "--index-topk", type=_count, default=default.index_topk, help="of new indexers"
    )
    parser.add_argument(
        "--seed", type=_seed, default=default.seed, help="of new indexers' draw (default: 0)"
    )
    return parser


def _to_parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(name=f"{NAME} {TO_HF}", summary=TO_SUMMARY, examples=TO_EXAMPLES)
    _add_folders(
        parser,
        "a training run or converted checkpoint, its checkpoints folder, or one step",
        "the official folder to make",
    )
    parser.add_argument(
        "--dtype",
        choices=typing.get_args(StoredDtype),
        help=f"of the weights (default: what the checkpoint was converted to, else {to_hf.DEFAULT_DTYPE})",
    )
    parser.add_argument(
        "--shard-gb",
        type=_size,
        default=to_hf.SHARD_GB,
        help=f"largest file, in GiB (default: {to_hf.SHARD_GB:g})",
    )
    parser.add_argument(
        "--official",
        metavar="FOLDER",
        help="take config keys, tokenizer and other files from this official folder",
    )
    return parser


def _add_folders(parser: argparse.ArgumentParser, source: str, target: str) -> None:
    parser.add_argument("source", metavar="SRC", help=f"{source}; local or gs://")
    parser.add_argument("target", metavar="DST", help=f"{target}; local or gs://")
    parser.add_argument(
        "--threads",
        type=_count,
        default=Workers().threads,
        help="tensors or files at a time; memory grows with it (default: one a core, at most 8)",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="share the work with the other processes of this pod, over one file system",
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where it is no pod: process 0")
    parser.add_argument("--process-count", type=_count, metavar="N", help="with --coordinator")
    parser.add_argument("--process-index", type=_index, metavar="I", help="with --coordinator")


def _whole(text: str, lowest: int, highest: int) -> int:
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, {lowest} to {highest}")
    return int(text)


def _count(text: str) -> int:
    return _whole(text, 1, 2**31)


def _index(text: str) -> int:
    return _whole(text, 0, 2**31)


def _seed(text: str) -> int:
    return _whole(text, 0, 2**32 - 1)


def _size(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= MAX_SHARD_GB:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0, at most {MAX_SHARD_GB}")
    return value


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # numpy does the work; accelerators stay free
    sys.exit(main())
