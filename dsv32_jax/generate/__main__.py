"""Command: generate text from a checkpoint."""

import argparse
import dataclasses
import logging
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsv32_jax import command_line, errors, load_model, sharding, tokenizer
from dsv32_jax.cache import CacheConfig, CacheDtype
from dsv32_jax.config import Dtype
from dsv32_jax.generate import chat
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig, FinishEvent, TokenEvent
from dsv32_jax.generate.sampling import SamplingParams
from dsv32_jax.generate.text import TextStream

logger = logging.getLogger("dsv32_jax.generate")  # __name__ ends in __main__ here

SUMMARY = (
    "Generate text from a checkpoint and stream it to standard output: continue a text, answer a conversation in the "
    "official message format, or chat. Figures go to standard error."
)
EXAMPLES = """
python -m dsv32_jax.generate runs/sparse --prompt 'import os' --max-tokens 200
python -m dsv32_jax.generate DeepSeek-V3.2 --messages conversation.json --thinking
python -m dsv32_jax.generate DeepSeek-V3.2 --chat --temperature 1.0 --top-p 0.95
echo 'def main():' | python -m dsv32_jax.generate runs/sparse --prompt - --temperature 0 --speculative
"""
PAGE_SIZE = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; those of this process by default.

    Returns:
        Exit status: 0 done, 1 failed, 2 wrong usage.
    """
    with (
        command_line.Boundary() as boundary,
        command_line.logging_to_stderr(),
        command_line.sigterm_raises(),
    ):
        args = _parser().parse_args(argv)
        params = _params(args)
        with command_line.wrong_usage():
            words = load_model.load_tokenizer_of(args.checkpoint, args.tokenizer)
            talk = _conversation(args, words)
        wanted = max(args.samples, 1)
        cfg = engine_config(args, slots=min(args.slots, wanted), max_waiting=wanted)
        engine = load_engine(args, cfg, words)
        if talk is None:
            _continue_text(engine, words, params, args)
        elif args.chat:
            chat.converse(engine, talk, params)
        else:
            chat.answer(engine, talk, params)
        _report(engine)
    return boundary.status


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        name="python -m dsv32_jax.generate", summary=SUMMARY, examples=EXAMPLES
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", type=Path, help=f"the model: {load_model.KINDS}"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text to continue; - reads it from standard input")
    what.add_argument(
        "--messages", type=Path, metavar="FILE.json", help="a list of messages to answer"
    )
    what.add_argument("--chat", action="store_true", help="talk at the terminal")
    parser.add_argument(
        "--thinking", action="store_true", help="let the model think before it answers"
    )
    parser.add_argument("--system", help="first message of --chat")
    parser.add_argument(
        "--tools-block",
        type=Path,
        metavar="PATH",
        help="text that describes tools to the model: the checkpoint's encoding/ folder or a file (default: the "
        "checkpoint's own, else this project's wording)",
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens to draw (256)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0 takes the likeliest token (1.0)"
    )
    parser.add_argument("--top-p", type=float, default=0.95, help="probability to keep (0.95)")
    parser.add_argument("--top-k", type=int, default=0, help="tokens to keep; 0 all (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end token")
    parser.add_argument(
        "--samples",
        type=int,
        default=1,
        help="continuations of --prompt, each with its own seed (1)",
    )
    add_engine_options(parser)
    return parser


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
        ValueError: If the mesh does not fit the devices or the batch, or the tokenizer has more tokens than the model.
    """
    mesh = None if args.mesh is None else sharding.make_mesh(sharding.parse_mesh(args.mesh))
    logger.info("loading %s", args.checkpoint)
    dtype = args.dtype or load_model.saved_dtype(args.checkpoint)
    model = load_model.load_model(args.checkpoint, dtype, mesh=mesh, narrow=True)
    if words.vocab_size > model.cfg.vocab_size:
        raise errors.UsageError(
            f"the tokenizer has {words.vocab_size} tokens, the model {model.cfg.vocab_size}"
        )
    return Engine(model, cfg, eos_id=words.eos_id, mesh=mesh)


def _params(args: argparse.Namespace) -> SamplingParams:
    if args.samples < 1:
        raise ValueError(f"--samples {args.samples} must be at least 1")
    if args.samples > 1 and args.prompt is None:
        raise ValueError("--samples works with --prompt")
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
    )


def _conversation(args: argparse.Namespace, words: tokenizer.Tokenizer) -> chat.Conversation | None:
    """Return the conversation to go on with, or None for a plain text."""
    if args.prompt is not None:
        for name in ("thinking", "system", "tools_block"):
            if getattr(args, name):
                raise ValueError(f"--{name.replace('_', '-')} works with --messages or --chat")
        return None
    if args.messages is not None:
        if args.system is not None:
            raise ValueError("--system works with --chat; --messages has its own")
        messages = chat.read_messages(args.messages)
    else:
        messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    block = chat.tools_block_of(args.checkpoint, args.tools_block)
    mode = "thinking" if args.thinking else "chat"
    return chat.Conversation(messages, words, mode, tools_block=block, stop=tuple(args.stop))


def _continue_text(
    engine: Engine, words: tokenizer.Tokenizer, params: SamplingParams, args: argparse.Namespace
) -> None:
    """Continue a text, once or several times."""
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    ids = words.encode(text)
    prompt = ids if words.bos_id is None else [words.bos_id, *ids]
    if not prompt:
        raise ValueError("the prompt is empty and the tokenizer has no token that opens a text")
    if args.samples == 1:
        for piece in stream_text(engine, words, prompt, params, tuple(args.stop)):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return
    for i, continuation in enumerate(_samples(engine, words, prompt, params, args)):
        sys.stdout.write(f"--- seed {params.seed + i}\n{continuation}\n")


def _samples(
    engine: Engine,
    words: tokenizer.Tokenizer,
    prompt: list[int],
    params: SamplingParams,
    args: argparse.Namespace,
) -> list[str]:
    """Draw several continuations side by side."""
    streams: dict[int, TextStream] = {}
    texts: dict[int, str] = {}
    for i in range(args.samples):
        number = engine.submit(prompt, dataclasses.replace(params, seed=params.seed + i))
        streams[number], texts[number] = TextStream(words, args.stop), ""
    begun, done = time.monotonic(), 0
    for event in engine.run():
        stream = streams[event.request]
        if isinstance(event, FinishEvent):
            texts[event.request] += stream.finish()
            done += 1
            rate = engine.stats.drawn_tokens / (time.monotonic() - begun)
            logger.info("%d of %d done, %.0f tokens/s", done, args.samples, rate)
        elif not stream.stopped and event.token != words.eos_id:
            texts[event.request] += stream.push(event.token)
            if stream.stopped:
                engine.cancel(event.request)
    return list(texts.values())


def stream_text(
    engine: Engine,
    words: tokenizer.Tokenizer,
    prompt: list[int],
    params: SamplingParams,
    stop: tuple[str, ...],
) -> Iterator[str]:
    """Run one request and yield its text as it comes.

    Args:
        engine: Idle.
        words: Decodes the tokens.
        prompt: Ids.
        params: How tokens are drawn.
        stop: Strings that end the text.

    Yields:
        Pieces of text; the end token has none.
    """
    stream = TextStream(words, stop)
    request = engine.submit(prompt, params)
    for event in engine.run():
        if isinstance(event, TokenEvent) and event.token != words.eos_id and not stream.stopped:
            yield stream.push(event.token)
            if stream.stopped:
                engine.cancel(request)
    yield stream.finish()


def _report(engine: Engine) -> None:
    stats = engine.stats
    line = f"{stats.drawn_tokens} tokens drawn, {stats.prompt_tokens} of prompts run"
    if stats.reused_tokens:
        line += f", {stats.reused_tokens} found in the cache"
    if stats.drafts:
        line += f"; {stats.acceptance:.0%} of {stats.drafts} drafts accepted"
    logger.info("%s", line)


if __name__ == "__main__":
    sys.exit(main())
