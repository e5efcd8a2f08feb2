"""Turn text into token ids and back: raw bytes, or a Hugging Face `tokenizer.json`."""

import json
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dsv32_jax.convert import storage
from dsv32_jax.convert.storage import Location

BYTES = "bytes"  # the one built-in tokenizer's name
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# Read only when no tokenizer_config.json names them: DeepSeek, Llama 3, GPT-2, Llama 2, Gemma.
WELL_KNOWN_BOS = ("<｜begin▁of▁sentence｜>", "<|begin_of_text|>", "<s>", "<bos>")
WELL_KNOWN_EOS = (
    "<｜end▁of▁sentence｜>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
)


@runtime_checkable  # so that the tests' type checks can look at it
class Tokenizer(Protocol):
    """What training and generation ask of a tokenizer.

    `encode` and `encode_batch` add no token of their own; `bos_id` is None where the vocabulary
    has no token that opens a text.
    """

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest id."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Return the id that opens a text, or None."""
        ...

    @property
    def eos_id(self) -> int:
        """Return the id that ends a text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, the same as `encode` on each."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        ...

    def token_id(self, text: str) -> int | None:
        """Return the one id that `text` encodes to if it is a token by itself, else None."""
        ...


class ByteTokenizer:
    """Treat each UTF-8 byte as a token: ids 0 to 255, then bos 256, eos 257 and pad 258.

    Lossless: `decode(encode(text)) == text` for every valid string. Nothing to download.
    """

    vocab_size = 259
    bos_id = 256
    eos_id = 257
    pad_id = 258

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text`.

        Args:
            text: any string without lone surrogates.

        Returns:
            ids in [0, 256), one a byte.
        """
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the UTF-8 bytes of each text.

        Args:
            texts: strings without lone surrogates.

        Returns:
            one list of ids a text, in order.
        """
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`.

        Args:
            ids: token ids. The three special ids have no text and are left out; an id outside
                the vocabulary, as a model with spare rows may sample, becomes U+FFFD.

        Returns:
            the text; bytes that are not UTF-8 become U+FFFD.
        """
        specials = {self.bos_id, self.eos_id, self.pad_id}
        unknown = "\ufffd".encode()
        parts = [
            bytes((i,)) if 0 <= i < 256 else unknown for i in map(int, ids) if i not in specials
        ]
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int | None:
        """Return the id of a text that is one token.

        Args:
            text: any string without lone surrogates.

        Returns:
            its byte if it has only one, else None.
        """
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 else None


class HFTokenizer:
    """Wrap a Hugging Face `tokenizer.json`.

    The file's own truncation and padding are switched off, and its post-processor adds nothing,
    so that a text's ids are the text's alone. A text that spells a special token encodes to that
    token: encoded messages need it.

    Args:
        path: the `tokenizer.json`, or a folder that holds one. A `tokenizer_config.json` beside
            it names bos and eos; without one they are looked up under well-known names.

    Raises:
        FileNotFoundError: there is no such file, or the folder has no `tokenizer.json`.
        ValueError: the file is no tokenizer, or no token that ends a text is found.
    """

    def __init__(self, path: str | Location):
        """Read the tokenizer; the class docstring has the arguments."""
        import tokenizers  # a compiled package that byte-level runs do without

        file = _tokenizer_file(storage.locate(path))
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file}: not a Hugging Face tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ValueError(f"{file}: the tokenizer's vocabulary is empty")
        # Ids may have holes, so the count of tokens is not the bound that an embedding needs.
        self._vocab_size = max(vocab.values()) + 1
        config = _tokenizer_config(file.with_name(TOKENIZER_CONFIG_FILE))
        self._bos_id = _special_id("bos_token", config, vocab, WELL_KNOWN_BOS, file)
        eos_id = _special_id("eos_token", config, vocab, WELL_KNOWN_EOS, file)
        if eos_id is None:
            raise ValueError(
                f"{file}: no token that ends a text: {TOKENIZER_CONFIG_FILE} names no eos_token"
                f" and the vocabulary has none of {', '.join(WELL_KNOWN_EOS)}"
            )
        self._eos_id = eos_id

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest id."""
        return self._vocab_size

    @property
    def bos_id(self) -> int | None:
        """Return the id that opens a text, or None."""
        return self._bos_id

    @property
    def eos_id(self) -> int:
        """Return the id that ends a text."""
        return self._eos_id

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with nothing added.

        Args:
            text: any string without lone surrogates.

        Returns:
            ids in [0, vocab_size).
        """
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, on all cores.

        Args:
            texts: strings without lone surrogates.

        Returns:
            one list of ids a text, in order.
        """
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens spelled out.

        Args:
            ids: token ids; one without a token has no text.

        Returns:
            the text.
        """
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        """Return the id of a text that is one token.

        Args:
            text: any string without lone surrogates.

        Returns:
            the id of the token that is spelled so, if the text also encodes to it, else None.
        """
        token = self._tokenizer.token_to_id(text)
        return token if token is not None and self.encode(text) == [token] else None


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """Return the tokenizer of a name or a path.

    Args:
        name_or_path: "bytes", or the path of a `tokenizer.json` or of a folder that holds one.

    Returns:
        the tokenizer.

    Raises:
        FileNotFoundError: neither the built-in name nor an existing tokenizer.
        ValueError: `name_or_path` is empty, or the file is no usable tokenizer.
    """
    if not name_or_path:
        raise ValueError(f'tokenizer="" must be "{BYTES}" or the path of a {TOKENIZER_FILE}')
    if name_or_path == BYTES:
        return ByteTokenizer()
    return HFTokenizer(name_or_path)


def _tokenizer_file(path: Location) -> Location:
    path = path.expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"tokenizer={str(path)!r}: no such file or folder, and the only built-in tokenizer"
            f' is "{BYTES}"'
        )
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"tokenizer={str(path)!r}: the folder has no {TOKENIZER_FILE}")
    return file


def _tokenizer_config(path: Location) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return config


def _special_id(
    key: str,
    config: dict[str, object],
    vocab: dict[str, int],
    well_known: tuple[str, ...],
    file: Location,
) -> int | None:
    """Return the id of the configured token, else of the first well-known one that exists."""
    if key not in config:
        return next((vocab[token] for token in well_known if token in vocab), None)
    entry = config[key]
    # Older files store an AddedToken object where newer ones store the string.
    token = entry.get("content") if isinstance(entry, dict) else entry
    if token is None:
        return None
    if not isinstance(token, str) or token not in vocab:
        raise ValueError(f"{file}: {key}={token!r} is not in the vocabulary")
    return vocab[token]
