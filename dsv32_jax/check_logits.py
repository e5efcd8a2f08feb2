"""Command: compare a model's logits and hidden states with those that a reference wrote down.

The reference is an npz file with `tokens` [B, T], `logits` [B, T, V] and, where wanted, `hidden` [L+1, B, T, D]: the
embedding, then the residual stream after each layer, the last one after the final norm. Rows may end in tokens -1,
which are not compared, and B may be left out of all three.

Two kinds of difference are expected of a right model: rounding, everywhere and small, and a flipped key at a near-tie
of the top-k, at few positions and large. So positions above a tolerance are counted, and listed.
"""

import argparse
import logging
import sys
import time
import typing
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dsv32_jax import command_line, load_model
from dsv32_jax.config import Dtype, ModelConfig
from dsv32_jax.convert import storage
from dsv32_jax.convert.storage import Location
from dsv32_jax.model import DeepSeekV32

logger = logging.getLogger("dsv32_jax.check_logits")  # __name__ is __main__ here

MAX_SHARE = 0.002  # positions that a near-tie at the top-k edge may put above the tolerance
MAX_LISTED = 20
PADDING = -1
SUMMARY = (
    "Compare a model's logits, and its hidden states where the reference has them, with a reference's. Exit status 1 "
    f"where more than {MAX_SHARE:.1%} of the positions differ by more than --atol."
)
EXAMPLES = """
python -m dsv32_jax.check_logits DeepSeek-tiny reference.npz
python -m dsv32_jax.check_logits runs/sparse reference.npz --atol 1e-3
python -m dsv32_jax.check_logits runs/sparse/checkpoints/500 reference.npz --dtype bfloat16
"""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a reference wrote down.

    Attributes:
        tokens: Token ids, -1 at the end of a row for padding.
        logits: Logits of each position.
        hidden: Embedding, then the stream after each layer, the last one after the final norm; or None.
    """

    tokens: Int[np.ndarray, "B T"]
    logits: Float[np.ndarray, "B T V"]
    hidden: Float[np.ndarray, "L1 B T D"] | None = None


class RowErrors(NamedTuple):
    """How one row differs from the reference, a figure a position; NaN where either side is NaN.

    Attributes:
        logit: Largest absolute difference of a logit.
        kl: KL(reference || ours) in nats.
        hidden: Largest absolute difference of the hidden states after each layer, or None.
    """

    logit: Float[np.ndarray, " T"]
    kl: Float[np.ndarray, " T"]
    hidden: Float[np.ndarray, "L1 T"] | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; those of this process by default.

    Returns:
        Exit status: 0 if the model agrees, 1 if not, 2 for wrong usage.
    """
    with command_line.Boundary() as boundary, command_line.logging_to_stderr():
        args = _parser().parse_args(argv)
        reference = read_reference(args.reference)
        model = load_model.load_model(args.checkpoint, args.dtype)
        check_fit(reference, model.cfg)
        boundary.started = True
        rows = list(compare(model, reference))
        sys.stdout.write(report(rows, args.atol))
        boundary.status = 0 if share_above(rows, args.atol) <= MAX_SHARE else 1
    return boundary.status


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        name="python -m dsv32_jax.check_logits", summary=SUMMARY, examples=EXAMPLES
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", type=storage.locate, help=f"the model: {load_model.KINDS}"
    )
    parser.add_argument(
        "reference",
        metavar="REFERENCE.npz",
        type=storage.locate,
        help="arrays tokens [B, T], logits [B, T, V] and, if wanted, hidden [L+1, B, T, D]: the embedding, then the "
        "stream after each layer, the last one after the final norm; rows may end in tokens -1, which are skipped",
    )
    parser.add_argument(
        "--atol",
        type=command_line.non_negative,
        default=1e-4,
        help="largest difference of a logit that is rounding (default: 1e-4)",
    )
    parser.add_argument(
        "--dtype",
        choices=typing.get_args(Dtype),
        default="float32",
        help="of activations and matrix products (default: float32)",
    )
    return parser


def read_reference(path: Location) -> Reference:
    """Read a reference's arrays and check that they fit each other.

    Args:
        path: The npz file.

    Returns:
        The arrays, with a row axis.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no npz file, lacks `tokens` or `logits`, or the shapes or kinds are wrong.
    """
    if not path.exists():
        raise FileNotFoundError(f"no file {path}")
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError(f"{path} is not an npz file")
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        missing = {"tokens", "logits"} - set(arrays.files)
        if missing:
            raise ValueError(
                f"{path} lacks {' and '.join(sorted(missing))}; it has {', '.join(arrays.files) or 'nothing'}"
            )
        tokens = _array(path, arrays, "tokens", np.integer)
        logits = _array(path, arrays, "logits", np.floating)
        hidden = _array(path, arrays, "hidden", np.floating) if "hidden" in arrays.files else None
    shapes = f"{path}: tokens {list(tokens.shape)}, logits {list(logits.shape)}"
    if hidden is not None:
        shapes += f", hidden {list(hidden.shape)}"
    if tokens.ndim == 1:
        tokens, logits = tokens[None], logits[None]
        hidden = None if hidden is None else hidden[:, None]
    fits = tokens.ndim == 2 and logits.ndim == 3 and logits.shape[:2] == tokens.shape
    if hidden is not None:
        fits &= hidden.ndim == 4 and hidden.shape[1:3] == tokens.shape
    if not fits:
        raise ValueError(f"{shapes} must be [B, T], [B, T, V] and [L+1, B, T, D]")
    if not (tokens != PADDING).any():
        raise ValueError(f"{path} has no token")
    return Reference(tokens=tokens, logits=logits, hidden=hidden)


def _array(path: Location, arrays: np.lib.npyio.NpzFile, name: str, kind: type) -> np.ndarray:
    try:
        array = arrays[name]
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: {name} can not be read: {error}") from error
    if not np.issubdtype(array.dtype, kind):
        raise ValueError(f"{path}: {name} is {array.dtype}; must be {kind.__name__}")
    return array


def check_fit(reference: Reference, cfg: ModelConfig) -> None:
    """Check that a reference can be of a model.

    Args:
        reference: The reference.
        cfg: The model's config.

    Raises:
        ValueError: If the vocabulary, the layers or the width differ, a token is out of the vocabulary, or padding
            comes before a token.
    """
    tokens, vocab = reference.tokens, cfg.vocab_size
    if reference.logits.shape[2] != vocab:
        raise ValueError(
            f"the reference's logits are over {reference.logits.shape[2]} tokens, the model's vocab_size is {vocab}"
        )
    outside = (tokens < PADDING) | (tokens >= vocab)
    if outside.any():
        row, position = np.argwhere(outside)[0]
        raise ValueError(
            f"token {tokens[row, position]} at row {row}, position {position} is not in [0, {vocab})"
        )
    is_padding = tokens == PADDING
    if (is_padding[:, :-1] & ~is_padding[:, 1:]).any():
        row = int(np.argmax((is_padding[:, :-1] & ~is_padding[:, 1:]).any(axis=1)))
        raise ValueError(f"row {row} has padding ({PADDING}) before a token")
    if reference.hidden is not None:
        have, want = reference.hidden.shape, (cfg.n_layers + 1, cfg.dim)
        if (have[0], have[3]) != want:
            raise ValueError(
                f"the reference's hidden has {have[0]} states of width {have[3]}, the model has {want[0]} of {want[1]}"
            )


def compare(model: DeepSeekV32, reference: Reference) -> Iterator[RowErrors]:
    """Run the model on one row after the other and measure how it differs.

    Args:
        model: The model.
        reference: The reference, which must fit it.

    Yields:
        Each row's errors, over its tokens without the padding.
    """
    begun = time.monotonic()
    for row, tokens in enumerate(reference.tokens):
        length = int((tokens != PADDING).sum())
        # Later tokens change nothing, so padding may be any token, and one shape compiles once.
        padded = jnp.asarray(np.maximum(tokens, 0), jnp.int32)
        logits, hidden = _forward(model, padded[None], reference.hidden is not None)
        theirs = None if reference.hidden is None else reference.hidden[:, row, :length]
        ours = None if hidden is None else np.asarray(hidden, np.float64)[:, :length]
        yield row_errors(
            np.asarray(logits, np.float64)[:length], reference.logits[row, :length], ours, theirs
        )
        rate = (time.monotonic() - begun) / (row + 1)
        left = rate * (len(reference.tokens) - row - 1)
        logger.info(
            "row %d of %d, %.1f s a row, %.0f s left", row + 1, len(reference.tokens), rate, left
        )


@jax.jit(static_argnames="with_hidden")
def _forward(
    model: DeepSeekV32, tokens_BT: Int[Array, "1 T"], with_hidden: bool
) -> tuple[Float[Array, "T V"], Float[Array, "L1 T D"] | None]:
    """Return the row's logits and its hidden states in the reference's order."""
    out = model(tokens_BT, keep_hidden=with_hidden)
    logits = model.logits(out.hidden)[0]
    if not with_hidden:
        return logits, None
    embedded = model.embed[...].astype(out.hidden.dtype)[tokens_BT]
    stacks = [stats.hidden for stats in (out.dense, out.moe) if stats is not None]
    streams = [hidden for hidden in stacks if hidden is not None]
    before_norm = jnp.concatenate([embedded[None], *streams])[:-1]
    return logits, jnp.concatenate([before_norm, out.hidden[None]])[:, 0].astype(jnp.float32)


def row_errors(
    ours: Float[np.ndarray, "T V"],
    theirs: Float[np.ndarray, "T V"],
    our_hidden: Float[np.ndarray, "L1 T D"] | None = None,
    their_hidden: Float[np.ndarray, "L1 T D"] | None = None,
) -> RowErrors:
    """Measure one row in float64.

    Args:
        ours: The model's logits.
        theirs: The reference's logits.
        our_hidden: The model's hidden states, or None.
        their_hidden: The reference's, or None.

    Returns:
        The errors; NaN where either side is NaN or both are the same infinity.
    """
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    hidden = None
    with np.errstate(invalid="ignore"):
        if our_hidden is not None and their_hidden is not None:
            hidden = np.abs(our_hidden - their_hidden.astype(np.float64)).max(axis=-1)
        log_p, log_q = _log_softmax(theirs), _log_softmax(ours)
        kl = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
        return RowErrors(np.abs(ours - theirs).max(axis=-1), kl, hidden)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def above(errors_T: Float[np.ndarray, "..."], atol: float) -> Bool[np.ndarray, "..."]:
    """Tell which errors are above the tolerance; NaN is."""
    return ~(errors_T <= atol)


def share_above(rows: Sequence[RowErrors], atol: float) -> float:
    """Return the share of positions, of all rows together, with a logit above the tolerance.

    Args:
        rows: The errors.
        atol: The tolerance.

    Returns:
        A share in [0, 1].
    """
    return float(above(np.concatenate([row.logit for row in rows]), atol).mean())


def report(rows: Sequence[RowErrors], atol: float) -> str:
    """Write the figures out.

    Args:
        rows: The errors of each row.
        atol: The tolerance.

    Returns:
        Lines of text, the verdict last.
    """
    logit = np.concatenate([row.logit for row in rows])
    kl = np.concatenate([row.kl for row in rows])
    share = share_above(rows, atol)
    lines = [
        f"positions          {logit.size} in {len(rows)} rows",
        f"|logit error|      {_spread(logit)} (largest of each position)",
        f"KL(reference||us)  max {kl.max():.2e}, mean {kl.mean():.2e} nats",
        *_hidden_table(rows),
        *_listing(rows, atol),
    ]
    verdict = "agrees" if share <= MAX_SHARE else "DIFFERS"
    lines.append(
        f"{verdict}: {share:.2%} of the positions are above {atol:g}; {MAX_SHARE:.1%} may be"
    )
    return "\n".join(lines) + "\n"


def _spread(values: np.ndarray) -> str:
    high, middle = np.quantile(values, [0.999, 0.5])
    return f"max {values.max():.2e}, 99.9% {high:.2e}, median {middle:.2e}"


def _hidden_table(rows: Sequence[RowErrors]) -> list[str]:
    per_row = [row.hidden for row in rows if row.hidden is not None]
    if not per_row:
        return []
    errors_LT = np.concatenate(per_row, axis=1)
    last = len(errors_LT) - 1
    names = ["embedding", *(f"layer {i}" for i in range(last - 1)), f"layer {last - 1}, normed"]
    lines = ["|hidden error| after"]
    return lines + [
        f"  {name:16} {_spread(values)}" for name, values in zip(names, errors_LT, strict=True)
    ]


def _listing(rows: Sequence[RowErrors], atol: float) -> list[str]:
    """List the first positions above the tolerance."""
    found = [
        f"  row {number}, position {position}: {row.logit[position]:.2e}"
        for number, row in enumerate(rows)
        for position in np.flatnonzero(above(row.logit, atol))
    ]
    shown = f", the first {MAX_LISTED}" if len(found) > MAX_LISTED else ""
    return [f"positions above {atol:g}: {len(found)}{shown}", *found[:MAX_LISTED]]


if __name__ == "__main__":
    sys.exit(main())
