"""Problems that reasoning-gym generates: a key in, a task out."""

import dataclasses
import functools
import hashlib
import json
import math
from typing import Any

from dsv32_jax.config import require
from dsv32_jax.errors import UsageError
from train.overrides import nearest
from train.rl.tasks import Task

CHUNK = 64  # problems of one generator: making one reads word lists and the like


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A generator of reasoning-gym.

    Attributes:
        name: As `reasoning_gym.factory.DATASETS` has it, such as "chain_sum".
        weight: Its share of the tasks, relative to the others'.
        settings: Of the generator, as pairs, such as (("min_terms", 2),).
    """

    name: str
    weight: float = 1.0
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        """Check the weight."""
        check_weight(self.name, self.weight)

    @classmethod
    def from_text(cls, text: str) -> "Family":
        """Read a family off a command line.

        Args:
            text: `NAME`, `NAME@WEIGHT`, and settings behind colons, such as `chain_sum@2:max_terms=3:max_digits=1`.

        Returns:
            The family.

        Raises:
            ValueError: If it is not written so.
        """
        head, *pairs = text.split(":")
        name, at, weight = head.partition("@")
        settings = []
        for pair in pairs:
            key, equals, value = pair.partition("=")
            require(bool(key and equals), f"{text}: {pair!r} must be written setting=value")
            settings.append((key, _scalar(value)))
        try:
            number = float(weight) if at else 1.0
        except ValueError:
            raise ValueError(f"{text}: the weight {weight!r} must be a number") from None
        return cls(name=name, weight=number, settings=tuple(settings))


def draw_problem(family: Family, *key: str | int) -> Task:
    """Return the problem of a family that a key stands for.

    Args:
        family: The family.
        key: Any names and numbers, then an index from 0 on; the same give the same problem, others an unrelated one.

    Returns:
        The task.

    Raises:
        UsageError: If reasoning-gym is not installed, or has no such family or setting.
    """
    *names, index = key
    assert isinstance(index, int), "a key ends with an index"
    category = make_generator(family.name, family.settings).category
    chunk, place = divmod(index, CHUNK)
    entry = _make_chunk(family.name, family.settings, (*names, chunk))[place]
    return Task(
        name=":".join(map(str, (family.name, *key))),
        domain=category,
        question=entry["question"],
        verifier="reasoning_gym",
        answer=entry["answer"] or "",  # some families only check
        data={"family": family.name, "settings": family.settings, "entry": entry},
    )


@functools.lru_cache(maxsize=32)
def _make_chunk(
    name: str, settings: tuple[tuple[str, Any], ...], key: tuple[str | int, ...]
) -> Any:
    """Return a generator of CHUNK problems: a few families can not count further than the size they are made with."""
    return _make(name, settings, seed=number_of(name, *key) % 2**32, size=CHUNK)


@functools.cache
def make_generator(name: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    """Return the generator of reasoning-gym that scores answers to a family's problems.

    Args:
        name: Of the family.
        settings: Of the generator.

    Returns:
        A `reasoning_gym.dataset.ProceduralDataset`; equal arguments return the same.

    Raises:
        UsageError: If reasoning-gym is not installed, or has no such family or setting.
    """
    return _make(name, settings, seed=0, size=1)


def _make(name: str, settings: tuple[tuple[str, Any], ...], *, seed: int, size: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UsageError(f"reasoning-gym needs `pip install 'dsv32-jax[rl]'` ({error})") from error
    if name not in DATASETS:
        close = nearest(name, sorted(DATASETS))
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {len(DATASETS)} others"
        raise UsageError(f"reasoning-gym has no family {name!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **dict(settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"{name} does not take settings {dict(settings)}: {error}") from error


def number_of(*key: str | int) -> int:
    """Return a number that stands for a key.

    Args:
        key: Names and numbers.

    Returns:
        48 bits; unrelated keys have unrelated ones.
    """
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:6])


def _scalar(text: str) -> Any:
    """Return a setting's value as JSON has it, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_weight(name: str, weight: float) -> None:
    """Refuse a share of a mixture that is no positive number.

    Args:
        name: Whose.
        weight: The share.

    Raises:
        ValueError: If it is not.
    """
    positive = weight > 0 and math.isfinite(weight)
    require(positive, f"{name}: weight={weight} must be a positive finite number")
