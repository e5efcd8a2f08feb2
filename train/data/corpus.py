"""Hold a source's documents as token ids, any piece of any document at hand."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt64

from dsv32_jax import tokenizer as tokenizers
from train.data import config, documents, examples, files, hashing, readers, token_files

# Enough texts for a tokenizer that runs on all cores, few enough to hold.
TEXTS_PER_BATCH = 256


@runtime_checkable  # so that the tests' type checks can look at it
class Corpus(Protocol):
    """A source's documents.

    Attributes:
        source: where they came from.
        lengths: tokens in each document.
        keys: each document's hash, see `hashing`.
        n_ids: one more than the largest id that may occur.
    """

    source: config.Source
    lengths: Int64[np.ndarray, " docs"]
    keys: UInt64[np.ndarray, " docs"]
    n_ids: int

    def tokens(self, document: int, start: int, stop: int) -> Int32[np.ndarray, " _"]:
        """Return the ids of a document from `start` up to `stop`."""
        ...


@dataclasses.dataclass(kw_only=True)
class TextCorpus:
    """Documents tokenised at the start and held in memory: 4 bytes a token on every host.

    Attributes:
        source: where they came from.
        lengths: tokens in each document.
        keys: each document's hash.
        n_ids: the tokenizer's vocabulary size.
        stream: all ids, one document after another.
        starts: where each document starts in `stream`.
    """

    source: config.Source
    lengths: Int64[np.ndarray, " docs"]
    keys: UInt64[np.ndarray, " docs"]
    n_ids: int
    stream: Int32[np.ndarray, "tokens"]
    starts: Int64[np.ndarray, " docs"]

    def tokens(self, document: int, start: int, stop: int) -> Int32[np.ndarray, " _"]:
        """Return the ids of a document from `start` up to `stop`.

        Args:
            document: its number.
            start: first position.
            stop: one past the last position.

        Returns:
            a view of the ids.
        """
        offset = int(self.starts[document])
        return self.stream[offset + start : offset + stop]


@dataclasses.dataclass(kw_only=True)
class ExampleCorpus(TextCorpus):
    """Documents of which some tokens train; a document's key hashes its prompt, which comes before these.

    Attributes:
        trained: which ids of `stream` train.
        names: each document's file and line.
    """

    trained: Bool[np.ndarray, " tokens"]
    names: list[str]

    def trained_tokens(self, document: int, start: int, stop: int) -> Bool[np.ndarray, " _"]:
        """Return which of a document's tokens train, from `start` up to `stop`."""
        offset = int(self.starts[document])
        return self.trained[offset + start : offset + stop]


@dataclasses.dataclass(kw_only=True)
class TokenFileCorpus:
    """Documents of token files, read when asked for: 16 bytes a document in memory.

    A piece costs the reading of its whole document, so a corpus of documents of many millions of
    tokens reads slowly.

    Attributes:
        source: where they came from.
        lengths: tokens in each document.
        keys: each document's hash.
        n_ids: one more than the largest id in the files.
        records: the open files.
    """

    source: config.Source
    lengths: Int64[np.ndarray, " docs"]
    keys: UInt64[np.ndarray, " docs"]
    n_ids: int
    records: token_files.TokenRecords

    def tokens(self, document: int, start: int, stop: int) -> Int32[np.ndarray, " _"]:
        """Return the ids of a document from `start` up to `stop`.

        Args:
            document: its number.
            start: first position.
            stop: one past the last position.

        Returns:
            the ids, read-only.
        """
        return self.records[document][start:stop]


def open_corpora(cfg: config.DataConfig) -> tuple[Corpus, ...]:
    """Open every source of a configuration: tokenise text, index token files.

    Args:
        cfg: the configuration; its sources, tokenizer and `examples` are read.

    Returns:
        one corpus a source, in order.

    Raises:
        FileNotFoundError: a source or the tokenizer does not exist.
        ValueError: a file is broken, or a source holds no document with text.
    """
    if cfg.examples:
        words = tokenizers.load_tokenizer(cfg.tokenizer)
        return tuple(_read_examples(source, words) for source in cfg.sources)
    token_paths = [token_paths_of(source) for source in cfg.sources]
    tokenizer = None if all(token_paths) else tokenizers.load_tokenizer(cfg.tokenizer)
    corpora: list[Corpus] = []
    for source, paths in zip(cfg.sources, token_paths, strict=True):
        if paths:
            corpora.append(_open_token_files(source, paths))
        else:
            assert tokenizer is not None
            corpora.append(_read_text(source, tokenizer))
    return tuple(corpora)


def token_paths_of(source: config.Source) -> list[pathlib.Path]:
    """List the token files of a source of token files.

    Args:
        source: the source.

    Returns:
        its files, or an empty list where they hold text.

    Raises:
        FileNotFoundError: there is no such source.
        ValueError: the source mixes token files with text.
    """
    if source.path in config.BUILT_IN:
        return []
    paths = files.list_files(source.path)
    tokens = [path for path in paths if files.file_format(path) == "tokens"]
    if tokens and len(tokens) < len(paths):
        text = next(path for path in paths if path not in tokens)
        raise ValueError(
            f"source {source.path!r} mixes token files with text ({tokens[0].name}, {text.name});"
            " name one kind with a glob"
        )
    local = [path for path in tokens if isinstance(path, pathlib.Path)]
    if len(local) < len(tokens):
        raise ValueError(
            f"source {source.path!r}: token files are read from a file system, not from a bucket;"
            " copy them to every host, or mount the bucket (gcsfuse)"
        )
    return local


def encode_documents(
    texts: Iterator[documents.Document], tokenizer: tokenizers.Tokenizer
) -> Iterator[Int32[np.ndarray, " _"]]:
    """Encode documents: bos where the tokenizer has one, the text, eos.

    Args:
        texts: the documents; those without text are skipped.
        tokenizer: the tokenizer.

    Yields:
        each document's ids.

    Raises:
        ValueError: a text has lone surrogates, as JSON escapes may write.
    """
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    kept = (document for document in texts if document.text)
    for batch in itertools.batched(kept, TEXTS_PER_BATCH):
        for document in batch:
            _check_unicode(document)
        for ids in tokenizer.encode_batch([document.text for document in batch]):
            yield np.array([*bos, *ids, tokenizer.eos_id], np.int32)


def _check_unicode(document: documents.Document) -> None:
    try:
        document.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{document.name}: lone surrogate at character {error.start}: not valid Unicode"
        ) from error


def _read_text(source: config.Source, tokenizer: tokenizers.Tokenizer) -> TextCorpus:
    encoded = list(encode_documents(iter(readers.SourceReader(source)), tokenizer))
    if not encoded:
        raise ValueError(f"source {source.path!r} is empty: no document with text")
    lengths = np.array([len(tokens) for tokens in encoded], np.int64)
    return TextCorpus(
        source=source,
        lengths=lengths,
        keys=np.array([hashing.document_key(tokens) for tokens in encoded], np.uint64),
        n_ids=tokenizer.vocab_size,
        stream=np.concatenate(encoded),
        starts=np.cumsum(lengths) - lengths,
    )


def _read_examples(source: config.Source, tokenizer: tokenizers.Tokenizer) -> ExampleCorpus:
    found = list(examples.read_examples(source, tokenizer))
    if not found:
        raise ValueError(f"source {source.path!r} is empty: no example")
    lengths = np.array([len(one.tokens) for one in found], np.int64)
    firsts = [int(np.argmax(one.trained)) for one in found]
    # What all train on from the start have no prompt to be told by.
    prompts = [
        one.tokens[:first] if first > 1 else one.tokens
        for one, first in zip(found, firsts, strict=True)
    ]
    stream = np.concatenate([one.tokens for one in found])
    return ExampleCorpus(
        source=source,
        lengths=lengths,
        keys=np.array([hashing.document_key(prompt) for prompt in prompts], np.uint64),
        n_ids=max(tokenizer.vocab_size, int(stream.max()) + 1),
        stream=stream,
        starts=np.cumsum(lengths) - lengths,
        trained=np.concatenate([one.trained for one in found]),
        names=[one.name for one in found],
    )


def _open_token_files(source: config.Source, paths: list[pathlib.Path]) -> TokenFileCorpus:
    records = token_files.TokenRecords(paths)
    indices = [token_files.read_index(path) for path in paths]
    lengths = np.concatenate([index.lengths for index in indices])
    if not lengths.sum():
        raise ValueError(f"source {source.path!r} is empty: no document with tokens")
    if len(lengths) != len(records):
        raise ValueError(
            f"source {source.path!r}: indices count {len(lengths)} documents, the files hold"
            f" {len(records)}; delete the *{token_files.INDEX_SUFFIX} files"
        )
    return TokenFileCorpus(
        source=source,
        lengths=lengths,
        keys=np.concatenate([index.keys for index in indices]),
        n_ids=max(index.n_ids for index in indices),
        records=records,
    )
