"""Rows that have broken selection kernels, with the reports they come from, and a sort to compare with."""

import numpy as np


def expected(scores, k, start, end):
    """Sort each row's valid finite keys by (-score, index), keep k, list them ascending, then -1."""
    out = np.full((len(scores), k), -1, np.int32)
    for row, first, last, slots in zip(scores, start, end, out, strict=True):
        index = np.arange(max(first, 0), max(min(last, len(row)), max(first, 0)))
        index = index[np.isfinite(row[index])]
        best = index[np.argsort(-row[index].astype(np.float64), kind="stable")][:k]
        slots[: len(best)] = np.sort(best)
    return out


def _whole(scores, k):
    scores = np.asarray(scores, np.float32)
    n = len(scores)
    return scores, k, np.zeros(n, np.int32), np.full(n, scores.shape[1], np.int32)


def _bits(words):
    return np.asarray(words, np.uint32).view(np.float32)


def _winners(rng, n_rows, n_keys, value, n_winners=100):
    scores = np.full((n_rows, n_keys), value, np.float32)
    for row in scores:
        row[rng.permutation(n_keys)[:n_winners]] = rng.uniform(1, 2, n_winners)
    return scores


def cases(rng, scale):
    """Name -> (scores, k, start, end). `scale` shrinks keys and k alike; 1 is the reported size."""

    def size(n):
        return max(n // scale, 1)

    k = size(2048)
    odd = size(262208) + 1
    normal = rng.normal(size=(6, size(16384))).astype(np.float32)
    nan = np.where(rng.random(normal.shape) < np.linspace(0.5, 1, 6)[:, None], np.nan, normal)
    infinite = np.where(rng.random(normal.shape) < 0.3, np.inf, normal)
    infinite[::2] = np.where(rng.random(normal[::2].shape) < 0.9, -np.inf, infinite[::2])
    one_bin = 1 + rng.permutation(size(16384))[None] * 2.0**-23
    late = np.concatenate([np.full(size(9000), 1.0), 1 + np.arange(size(3000)) * 2.0**-23])
    subnormal = _bits(
        rng.integers(0, 2**20, normal.shape) | (rng.integers(0, 2, normal.shape) << 31)
    )
    zeros = np.where(rng.random(normal.shape) < 0.5, -0.0, 0.0)
    clipped = np.sort(rng.integers(-50, size(9000), (2, 7)), axis=0).astype(np.int32)
    some = rng.normal(size=(7, size(8191))).astype(np.float32)
    far = rng.normal(size=(5, odd)).astype(np.float32)
    far_start = rng.integers(0, odd // 2, 5).astype(np.int32)
    far_end = (far_start + rng.integers(0, odd // 2, 5)).astype(np.int32)
    longest = rng.normal(size=(1, size(2**20))).astype(np.float32)
    return {
        "normal": _whole(normal, k),
        "one half-precision bin (sglang#36807)": _whole(one_bin, k),
        "the largest of near ties come last (sglang#35257)": _whole(late[None], k),
        "winners over zeros (sglang#30645)": _whole(_winners(rng, 3, size(8320), 0.0), k),
        "winners over zeros in a long row": _whole(_winners(rng, 2, size(40000) + 3, 0.0), k),
        "NaN in most places (vllm#49896)": _whole(nan, k),
        "infinities": _whole(infinite, k),
        "equal and below half precision (cudnn-frontend#446)": _whole(
            np.full((2, size(16384) + 1), -1e5), size(9000) if scale > 4 else 2048
        ),
        "differing in 10 low bits (tilelang#1351)": _whole(
            _bits(0x3F900000 | rng.integers(0, 1024, (3, size(20000)))), k
        ),
        "logits times a thousand (maxtext#4136)": _whole(normal * 1e3, k),
        "as many slots as keys, an odd number (cudnn-frontend#406)": _whole(some[:5, :705], 705),
        "more slots than keys (FlashMLA)": _whole(some[:, :32], k),
        "an odd number of keys": _whole(far, k),
        "one slot": _whole(far, 1),
        "unaligned ranges, some empty": (far, k, far_start, far_end),
        "ranges past the keys": (some, k, clipped[0], clipped[1]),
        "all rows empty (DeepGEMM#353)": (
            some,
            k,
            np.full(7, 9, np.int32),
            np.full(7, 9, np.int32),
        ),
        "ranges shorter than k": (
            some,
            k,
            np.arange(7, dtype=np.int32),
            np.arange(7, dtype=np.int32) * 9,
        ),
        "all equal": _whole(np.full((3, size(30000)), 0.25), k),
        "signed zeros": _whole(zeros, k),
        "subnormals": _whole(subnormal, k),
        "sorted up and down": _whole([np.sort(far[0]), -np.sort(-far[1])], k),
        "few distinct values": _whole(2.0 ** rng.integers(-2, 3, (3, size(50000))), k),
        "a million keys": _whole(longest, k),
        "a million keys, equal": _whole(np.zeros((1, size(2**20))), k),
    }
