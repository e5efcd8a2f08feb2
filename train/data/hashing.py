"""Hash documents: the one thing that decides a document's side of the split and its order.

Hashes are of content and fixed for all time: neither file names, host count, library versions nor
the process enter them.
"""

import hashlib

import numpy as np
from jaxtyping import Int32, Int64, UInt64

from train.data import config

KEY_BYTES = 8
N_KEYS = 2 ** (8 * KEY_BYTES)


def document_key(tokens: Int32[np.ndarray, " _"]) -> int:
    """Hash a document's token ids.

    Args:
        tokens: the ids, bos and eos included.

    Returns:
        a key in [0, 2**64), uniform over documents.
    """
    data = np.ascontiguousarray(tokens, "<i4").data
    return int.from_bytes(hashlib.blake2b(data, digest_size=KEY_BYTES).digest(), "little")


def split_documents(
    keys: UInt64[np.ndarray, " docs"], *, heldout_fraction: float, split: config.Split
) -> Int64[np.ndarray, " chosen"]:
    """Choose the documents of one side of the split.

    A document is held out where `key < heldout_fraction * 2**64`, so a larger fraction only adds
    to the held-out side.

    Args:
        keys: each document's hash.
        heldout_fraction: in [0, 1).
        split: the side.

    Returns:
        the numbers of that side's documents, ascending; the two sides partition all documents.
    """
    heldout = keys < np.uint64(int(heldout_fraction * N_KEYS))
    return np.flatnonzero(heldout if split == "heldout" else ~heldout)


def shuffle_documents(
    documents: Int64[np.ndarray, " chosen"], *, keys: UInt64[np.ndarray, " docs"], seed: int
) -> Int64[np.ndarray, " chosen"]:
    """Order documents by a hash of key, copy and seed, so whatever the order of files was.

    Copies of a document are counted, so that they fall apart instead of lying side by side.

    Args:
        documents: numbers of documents.
        keys: the hash of each document of the corpus.
        seed: another seed gives another order.

    Returns:
        the same numbers, reordered.
    """
    salt = _splitmix64(np.array([seed], np.uint64))
    chosen = keys[documents]
    mixed = _splitmix64(chosen ^ salt) ^ (_copies(chosen) * np.uint64(0xD1342543DE82EF95))
    return documents[np.argsort(mixed, kind="stable")]


def _copies(keys: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Return how many equal keys come before each: 0 where a key is the first or only one."""
    order = np.argsort(keys, kind="stable")
    in_order, places = keys[order], np.arange(len(keys), dtype=np.uint64)
    is_first = np.concatenate([np.ones(min(len(keys), 1), bool), in_order[1:] != in_order[:-1]])
    copies = np.empty(len(keys), np.uint64)
    copies[order] = places - np.maximum.accumulate(np.where(is_first, places, np.uint64(0)))
    return copies


def _splitmix64(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Scramble 64-bit integers, one to one.

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
