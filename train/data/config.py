"""Say which text a run trains on and how rows are made of it."""

import dataclasses
import math
from typing import Literal

from dsv32_jax import tokenizer as tokenizers

Split = Literal["train", "heldout"]

STDLIB = "stdlib"  # the default corpus's name
BUILT_IN = (STDLIB, "site-packages")
MAX_SEED = 2**32 - 1  # grain's index shuffle takes 32-bit seeds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One corpus of a mixture.

    Attributes:
        path: a file, a folder (searched recursively for known suffixes), a glob (`**` included),
            or a built-in corpus: "stdlib", the standard library of the running Python, or
            "site-packages", the packages installed beside it. Write "./stdlib" for a folder of
            that name.
        weight: this source's share of the rows, relative to the other sources' weights. With one
            source it has no effect.
        text_field: the field of a JSONL line, or the column of a Parquet file, that holds the
            text. Other formats have none.

    Raises:
        ValueError: `path` or `text_field` is empty, or `weight` is not a positive finite number.
    """

    path: str
    weight: float = 1.0
    text_field: str = "text"

    def __post_init__(self) -> None:
        """Check each field."""
        if not self.path:
            raise ValueError("source path='' must name a file, a folder, a glob or 'stdlib'")
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ValueError(
                f"source {self.path!r}: weight={self.weight} must be a positive finite number;"
                " leave the source out to give it no weight"
            )
        if not self.text_field:
            raise ValueError(f"source {self.path!r}: text_field='' must name a field")

    @classmethod
    def from_text(cls, text: str) -> "Source":
        """Read a source off a command line.

        Args:
            text: `PATH` or `PATH@WEIGHT`, such as `books/*.jsonl@2.5`.

        Returns:
            The source, with the default text field.

        Raises:
            ValueError: the path is empty or the weight not positive.
        """
        path, at, weight = text.rpartition("@")
        if at and weight.replace(".", "", 1).isdecimal():
            return cls(path=path, weight=float(weight))
        return cls(path=text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data.

    Attributes:
        sources: the mixture. A document is encoded as bos (where the tokenizer has one), the
            text, eos; documents without text are skipped.
        tokenizer: "bytes", or the path of a `tokenizer.json` or its folder. Token files hold
            ids already and do not read it.
        seq_len: tokens a row, at least 2: one token predicts nothing.
        batch_size: rows an optimizer step, over all hosts.
        seed: orders documents and rows; in [0, 2**32). Held-out rows do not depend on it.
        examples: the sources are examples (see `examples`): only the tokens that they say train,
            and each lies whole in a row. Held out are all examples of a prompt or none.
        pack: fill each row with one document after another; if not, a row holds one document or
            a part of one, and padding.
        heldout_fraction: the share of documents, in [0, 1), kept from training. A document
            belongs to one side by a hash of its tokens alone, so neither order, file, seed nor
            host count moves it, and copies of it stay together. Small corpora may miss the
            fraction by much.
        shuffle: draw rows in a new order each epoch; if not, in the order of files and lines.
        prefetch: batches that threads prepare ahead; 0 prepares each when asked for it, the
            fastest where the corpus is in memory.

    Raises:
        ValueError: a field breaks its rule above.
    """

    sources: tuple[Source, ...] = (Source(path=STDLIB),)
    tokenizer: str = tokenizers.BYTES
    seq_len: int
    batch_size: int
    seed: int
    examples: bool = False
    pack: bool = True
    heldout_fraction: float = 0.05
    shuffle: bool = True
    prefetch: int = 0

    def __post_init__(self) -> None:
        """Check each field."""
        if not self.sources:
            raise ValueError("sources=() must name at least one source")
        if self.seq_len < 2:
            raise ValueError(f"seq_len={self.seq_len} must be at least 2")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed={self.seed} must be in [0, 2**32)")
        if not 0 <= self.heldout_fraction < 1:
            raise ValueError(f"heldout_fraction={self.heldout_fraction} must be in [0, 1)")
        if self.prefetch < 0:
            raise ValueError(f"prefetch={self.prefetch} must not be negative")
