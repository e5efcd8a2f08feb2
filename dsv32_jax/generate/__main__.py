"""Command: generate text from a checkpoint."""

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Iterator, Sequence

from dsv32_jax import command_line, load_model, tokenizer
from dsv32_jax.convert import storage
from dsv32_jax.generate import chat, options
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import FinishEvent
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; those of this process by default.

    Returns:
        Exit status: 0 done, 1 failed, 2 wrong usage.
    """
    with (
        command_line.Boundary(resumes=False) as boundary,
        command_line.logging_to_stderr(),
        command_line.sigterm_raises(),
    ):
        args = _parser().parse_args(argv)
        params = _params(args)
        with command_line.wrong_usage():
            words = load_model.load_tokenizer_of(args.checkpoint, args.tokenizer)
            talk = _conversation(args, words)
            prompt = _prompt(args, words, talk)
        slots = min(args.slots, args.samples)
        cfg = options.engine_config(args, slots=slots, max_waiting=args.samples)
        engine = options.load_engine(args, cfg, words)
        boundary.started = True
        if talk is None:
            _continue_text(engine, words, prompt, params, args)
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
        "checkpoint", metavar="CKPT", type=storage.locate, help=f"the model: {load_model.KINDS}"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text to continue; - reads it from standard input")
    what.add_argument(
        "--messages", type=storage.locate, metavar="FILE.json", help="a list of messages to answer"
    )
    what.add_argument("--chat", action="store_true", help="talk at the terminal")
    parser.add_argument(
        "--thinking", action="store_true", help="let the model think before it answers"
    )
    parser.add_argument("--system", help="first message of --chat")
    parser.add_argument(
        "--tools-block",
        type=storage.locate,
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
    options.add_engine_options(parser)
    return parser


def _params(args: argparse.Namespace) -> SamplingParams:
    if args.samples < 1:
        raise ValueError(f"--samples {args.samples} must be at least 1")
    if args.samples > 1 and args.prompt is None:
        raise ValueError("--samples works with --prompt")
    if "" in args.stop:
        raise ValueError("--stop '' would end every text before its first character")
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
    )
    dataclasses.replace(
        params, seed=args.seed + args.samples - 1
    )  # the last sample's seed counts too
    return params


def _conversation(args: argparse.Namespace, words: tokenizer.Tokenizer) -> chat.Conversation | None:
    """Return the conversation to go on with, or None for a plain text."""
    if args.prompt is not None:
        for name in ("thinking", "system", "tools_block"):
            if getattr(args, name) not in (None, False):
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
    return chat.Conversation(
        messages,
        words,
        mode,
        tools_block=block,
        response_format_block=chat.response_format_block_of(args.checkpoint),
        stop=tuple(args.stop),
    )


def _prompt(
    args: argparse.Namespace, words: tokenizer.Tokenizer, talk: chat.Conversation | None
) -> list[int]:
    """Return the text to go on with, as far as it is known before the model is loaded."""
    if args.chat:
        return []
    if talk is not None:
        if talk.messages[-1].get("role") not in chat.ANSWERED:
            raise ValueError(
                f"{args.messages}: the last message must be of {', '.join(chat.ANSWERED)}"
            )
        prompt = talk.encode()
    else:
        ids = words.encode(chat.read_input() if args.prompt == "-" else args.prompt)
        prompt = ids if words.bos_id is None else [words.bos_id, *ids]
    if not prompt:
        raise ValueError("the prompt is empty and the tokenizer has no token that opens a text")
    if len(prompt) >= args.max_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens; --max-len {args.max_len} leaves no room for one more"
        )
    return prompt


def _continue_text(
    engine: Engine,
    words: tokenizer.Tokenizer,
    prompt: list[int],
    params: SamplingParams,
    args: argparse.Namespace,
) -> None:
    """Continue a text: one as it is drawn, several when all are done."""
    seeds = [params.seed + i for i in range(args.samples)]
    each = [dataclasses.replace(params, seed=seed) for seed in seeds]
    texts = [""] * len(seeds)
    for which, piece in stream_texts(engine, words, prompt, params=each, stop=args.stop):
        texts[which] += piece
        if args.samples == 1:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if args.samples == 1:
        sys.stdout.write("\n")
        return
    for seed, text in zip(seeds, texts, strict=True):
        sys.stdout.write(f"--- seed {seed}\n{text}\n")


def stream_texts(
    engine: Engine,
    words: tokenizer.Tokenizer,
    prompt: list[int],
    *,
    params: Sequence[SamplingParams],
    stop: Sequence[str] = (),
) -> Iterator[tuple[int, str]]:
    """Continue a prompt side by side and yield the texts as they come.

    Args:
        engine: Idle.
        words: Decodes the tokens.
        prompt: Ids.
        params: How each text is drawn.
        stop: Strings that end a text.

    Yields:
        (which text, a piece of it); the end token has none.
    """
    numbers = {engine.submit(prompt, one): i for i, one in enumerate(params)}
    streams = [TextStream(words, stop) for _ in params]
    begun, done = time.monotonic(), 0
    for event in engine.run():
        which = numbers[event.request]
        stream = streams[which]
        if isinstance(event, FinishEvent):
            yield which, stream.finish()
            done += 1
            rate = engine.stats.drawn_tokens / (time.monotonic() - begun)
            logger.info("%d of %d done, %.0f tokens/s", done, len(params), rate)
        elif not stream.stopped and event.token != words.eos_id:
            yield which, stream.push(event.token)
            if stream.stopped:
                engine.cancel(event.request)


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
