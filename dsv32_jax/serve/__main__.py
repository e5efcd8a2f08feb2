"""Command: serve a checkpoint over HTTP, with the endpoints of OpenAI's API."""

import argparse
import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Sequence

from dsv32_jax import command_line, errors, load_model
from dsv32_jax.convert import storage
from dsv32_jax.generate import chat, options
from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import EngineConfig
from dsv32_jax.serve.config import ServeConfig
from dsv32_jax.serve.worker import EngineWorker
from dsv32_jax.tokenizer import Tokenizer

logger = logging.getLogger("dsv32_jax.serve")  # __name__ ends in __main__ here

SUMMARY = (
    "Serve a checkpoint over HTTP with the endpoints of OpenAI's API: /v1/chat/completions, /v1/completions, "
    "/v1/models; also /health and /metrics. SIGTERM or SIGINT turns new requests away with 503 and lets running ones "
    "finish; a second one cuts them off. Exit status after either: 0."
)
EXAMPLES = """
python -m dsv32_jax.serve DeepSeek-V3.2 --thinking --max-len 32768
python -m dsv32_jax.serve runs/sparse --port 0 --dtype float32
python -m dsv32_jax.serve DeepSeek-V3.2 --host 0.0.0.0 --api-key-file key.txt --slots 16 --speculative
"""
EXTRA = ("starlette", "uvicorn", "prometheus_client")
API_KEY_VARIABLE = "DSV32_API_KEY"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; those of this process by default.

    Returns:
        Exit status: 0 stopped by a signal, 1 failed, 2 wrong usage.
    """
    with (
        command_line.Boundary() as boundary,
        command_line.logging_to_stderr(),
        command_line.sigterm_raises(),
    ):
        args = _parser().parse_args(argv)
        _check_extra()
        with command_line.wrong_usage():
            tokenizer = load_model.load_tokenizer_of(args.checkpoint, args.tokenizer)
            cfg, engine_cfg = _serve_config(args), _engine_config(args)
        # Before the model, which may take minutes to load.
        with _bind(args.host, args.port) as listener:
            worker = EngineWorker(_load(args, engine_cfg, tokenizer))
            boundary.started = True
            _serve(cfg, worker, tokenizer, listener, grace=args.grace)
    return boundary.status


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        name="python -m dsv32_jax.serve", summary=SUMMARY, examples=EXAMPLES
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", type=storage.locate, help=f"the model: {load_model.KINDS}")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (8000)")
    add("--model-name", help="what clients call the model (the checkpoint's folder name)")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--api-key", help=f"key that clients must send (${API_KEY_VARIABLE}, else none)"
    )
    keys.add_argument(
        "--api-key-file", type=storage.locate, metavar="FILE", help="a file that holds the key"
    )
    add("--thinking", action="store_true", help="let the model think where a request does not say")
    add(
        "--tools-block",
        type=storage.locate,
        metavar="PATH",
        help="text that describes tools to the model: the checkpoint's encoding/ folder or a file (default: the "
        "checkpoint's own, else this project's wording)",
    )
    add("--max-waiting", type=_count, default=256, help="texts that may wait for a slot (256)")
    add("--max-prompt-tokens", type=_count, help="longest prompt (--max-len less one)")
    add("--max-body-mb", type=_count, default=16, help="largest request body in MiB (16)")
    add(
        "--timeout",
        type=command_line.non_negative,
        default=600.0,
        help="seconds a request may take (600)",
    )
    add(
        "--grace",
        type=command_line.non_negative,
        default=30.0,
        help="seconds to finish after a signal (30)",
    )
    options.add_engine_options(parser)
    return parser


def _check_extra() -> None:
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise errors.UsageError(
            f"{' and '.join(missing)} must be installed: pip install 'dsv32-jax[serve]'"
        )


def _serve(
    cfg: ServeConfig,
    worker: EngineWorker,
    tokenizer: Tokenizer,
    listener: socket.socket,
    *,
    grace: float,
) -> None:
    """Serve until a signal comes."""
    from dsv32_jax.serve import app, server  # of the extra, which is known to be there now

    server.Server(app.make_app(cfg, worker, tokenizer), worker, grace=grace).run([listener])
    if worker.failure is not None:
        raise errors.WorkFailedError(f"the engine had failed: {worker.failure}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, 1 or above")
    return int(text)


def _serve_config(args: argparse.Namespace) -> ServeConfig:
    limits = {} if args.max_prompt_tokens is None else {"max_prompt": args.max_prompt_tokens}
    return ServeConfig(
        model=args.model_name or args.checkpoint.absolute().name,
        api_key=_api_key(args),
        thinking=args.thinking,
        timeout=args.timeout,
        max_body=args.max_body_mb * 2**20,
        tools_block=chat.tools_block_of(args.checkpoint, args.tools_block),
        response_format_block=chat.response_format_block_of(args.checkpoint),
        **limits,
    )


def _api_key(args: argparse.Namespace) -> str | None:
    key, where = args.api_key, "--api-key"
    if args.api_key_file is not None:
        key, where = args.api_key_file.read_text().strip(), args.api_key_file
    elif key is None:
        key, where = os.environ.get(API_KEY_VARIABLE), f"${API_KEY_VARIABLE}"
    if key is not None and (not key or not key.isascii() or not key.isprintable()):
        raise ValueError(f"{where} must be printable ASCII, and not empty")
    return key


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    # The worker bounds running and waiting texts together.
    return options.engine_config(args, slots=args.slots, max_waiting=args.slots + args.max_waiting)


def _bind(host: str, port: int) -> socket.socket:
    """Take the address; nobody is listened to yet."""
    if not 0 <= port < 2**16:
        raise errors.UsageError(f"--port {port} must be in [0, {2**16 - 1}]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise errors.UsageError(f"can not listen on {host} port {port}: {reason}") from error
    return listener


def _load(args: argparse.Namespace, cfg: EngineConfig, tokenizer: Tokenizer) -> Engine:
    """Load the model and compile its steps for every length, so that no client waits for that."""
    engine = options.load_engine(args, cfg, tokenizer)
    engine.warm_up()
    return engine


if __name__ == "__main__":
    sys.exit(main())
