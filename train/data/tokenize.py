"""Turn sources of text into token files, so that training need not tokenise at each start.

Run as a command: `python -m train.data.tokenize --help`.
"""

import itertools
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int32

from dsv32_jax import command_line
from dsv32_jax import tokenizer as tokenizers
from dsv32_jax.convert import storage
from dsv32_jax.convert.storage import Location
from train.data import config, corpus, documents, readers, token_files

SECONDS_PER_LINE = 2.0  # between two lines of progress
DEFAULT_SHARD_TOKENS = 250_000_000  # 1 GB of int32 before compression

SUMMARY = (
    "Turn sources of text into token files, so that training need not tokenise at each start. Train on the result by "
    "naming the folder as a source. A folder is written whole or not at all: an interrupted run starts over."
)
EXAMPLES = """
python -m train.data.tokenize runs/tokens/stdlib
python -m train.data.tokenize runs/tokens/web 'data/web/*.jsonl.zst' --tokenizer my-tokenizer/
python -m train.data.tokenize runs/tokens/mix notes/ books.parquet --text-field content
"""


class Progress:
    """Tell how far a conversion has come, every few seconds.

    Args:
        reader_list: the readers of all sources, asked for their bytes.
        report: takes each line of progress.
    """

    def __init__(self, reader_list: Sequence[readers.SourceReader], report: Callable[[str], None]):
        """Start the clock; the class docstring has the arguments."""
        self._readers = reader_list
        self._report = report
        sizes = [reader.n_bytes for reader in reader_list]
        known = [size for size in sizes if size is not None]
        # One source of unknown size makes any share of the whole a guess.
        self._n_bytes = sum(known) if len(known) == len(sizes) else None
        self._start = self._last = time.monotonic()
        self.n_documents = 0
        self.n_tokens = 0

    def watch(
        self, encoded: Iterable[Int32[np.ndarray, " _"]]
    ) -> Iterator[Int32[np.ndarray, " _"]]:
        """Pass documents on, counting them.

        Args:
            encoded: the ids of each document.

        Yields:
            the same documents.
        """
        for tokens in encoded:
            self.n_documents += 1
            self.n_tokens += tokens.size
            now = time.monotonic()
            if now - self._last >= SECONDS_PER_LINE:
                self._last = now
                self._report(self.line(now - self._start))
            yield tokens

    def line(self, seconds: float) -> str:
        """Describe the progress.

        Args:
            seconds: time since the start.

        Returns:
            counts, the rate, and where the sources' sizes are known the share and time left.
        """
        rate = self.n_tokens / max(seconds, 1e-9)
        text = f"{self.n_documents:,} documents, {self.n_tokens:,} tokens, {rate:,.0f} tokens/s"
        done = sum(reader.bytes_read for reader in self._readers)
        if not self._n_bytes or not done:
            return text
        left = seconds * max(self._n_bytes - done, 0) / done
        return f"{text}, {100 * done / self._n_bytes:.1f}%, {left:.0f} s left"


def open_sources(
    sources: Sequence[config.Source], folder: Location, shard_tokens: int
) -> list[readers.SourceReader]:
    """Check a request before any work is done.

    Args:
        sources: sources of text.
        folder: where the files shall go; must not exist.
        shard_tokens: tokens a file, at least 1.

    Returns:
        a reader for each source.

    Raises:
        FileExistsError: `folder` exists.
        FileNotFoundError: a source does not exist.
        ValueError: a source holds token files already, or a value breaks its rule.
    """
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens={shard_tokens} must be at least 1")
    if not isinstance(folder, pathlib.Path):
        raise ValueError(
            f"{folder}: token files are written to a file system; copy them to the bucket"
        )
    if folder.exists():
        raise FileExistsError(f"{folder} exists; name a new folder, or delete it first")
    for source in sources:
        if corpus.token_paths_of(source):
            raise ValueError(f"source {source.path!r} holds token files already")
    return [readers.SourceReader(source) for source in sources]


def tokenize(
    reader_list: Sequence[readers.SourceReader],
    folder: pathlib.Path,
    *,
    tokenizer: tokenizers.Tokenizer,
    report: Callable[[str], None],
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
) -> Progress:
    """Write the documents of opened sources as token files into a new folder.

    The work happens in `folder` + ".partial", renamed at the end, so that an interrupted run is
    never taken for a finished one; what such a run left there is deleted first.

    Args:
        reader_list: what `open_sources` gave for this folder.
        folder: where the files go.
        tokenizer: the tokenizer.
        report: takes each line of progress.
        shard_tokens: start another file after this many tokens, at least 1.

    Returns:
        the counts of documents and tokens.

    Raises:
        ValueError: a file is broken, or no document has text.
    """
    progress = Progress(reader_list, report)
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    texts: Iterator[documents.Document] = itertools.chain.from_iterable(reader_list)
    encoded = progress.watch(corpus.encode_documents(texts, tokenizer))
    for shard in itertools.count():
        first = next(encoded, None)
        if first is None:
            break
        path = partial / f"tokens-{shard:05d}.array_record"
        token_files.write_token_file(path, _shard(first, encoded, shard_tokens))
    if not progress.n_documents:
        raise ValueError("nothing to write: no document with text in the sources")
    partial.rename(folder)
    return progress


def _shard(
    first: Int32[np.ndarray, " _"], rest: Iterator[Int32[np.ndarray, " _"]], limit: int
) -> Iterator[Int32[np.ndarray, " _"]]:
    """Take documents until `limit` tokens are reached, at least the first."""
    yield first
    taken = first.size
    while taken < limit and (tokens := next(rest, None)) is not None:
        taken += tokens.size
        yield tokens


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments; None reads the command line.

    Returns:
        the exit status: 0 done, 1 failed, 2 wrong usage.
    """
    with command_line.Boundary() as boundary, command_line.sigterm_raises():
        args = _parser().parse_args(argv)
        tokenizer = tokenizers.load_tokenizer(args.tokenizer)
        sources = [config.Source(path=path, text_field=args.text_field) for path in args.sources]
        reader_list = open_sources(sources, args.folder, args.shard_tokens)
        boundary.started = True
        done = tokenize(
            reader_list,
            args.folder,
            tokenizer=tokenizer,
            report=_to_stderr,
            shard_tokens=args.shard_tokens,
        )
        sys.stdout.write(
            f"{done.n_documents:,} documents, {done.n_tokens:,} tokens in {args.folder}\n"
        )
    return boundary.status


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        name="python -m train.data.tokenize",
        summary=SUMMARY,
        examples=EXAMPLES,
    )
    parser.add_argument("folder", type=storage.locate, help="a new folder for the token files")
    parser.add_argument(
        "sources", nargs="*", default=[config.STDLIB], help="files, folders or globs (stdlib)"
    )
    parser.add_argument("--tokenizer", default=tokenizers.BYTES, help="name or path (bytes)")
    parser.add_argument("--text-field", default="text", help="field or column of the text (text)")
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=DEFAULT_SHARD_TOKENS,
        help=f"tokens a file, about ({DEFAULT_SHARD_TOKENS})",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
