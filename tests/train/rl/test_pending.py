import dataclasses

import numpy as np
import pytest

from train.rl import pending
from train.rl.groups import Group
from train.rl.rollout import KeptSets, Rollout


def make(rng, *, kept, experts):
    n_prompt, n_drawn = rng.integers(1, 6, size=2)
    sizes = rng.integers(1, 4, size=n_drawn)
    sets = KeptSets(rng.integers(0, 99, size=sizes.sum()).astype(np.int32), np.cumsum(sizes))
    return Rollout(
        tokens=rng.integers(0, 99, size=n_prompt + n_drawn).astype(np.int32),
        n_prompt=int(n_prompt), log_p=-rng.random(n_drawn).astype(np.float32),
        kept=sets if kept else None,
        experts=rng.integers(-1, 8, size=(2, n_prompt + n_drawn, 3)).astype(np.int16) if experts else None,
        temperature=float(rng.random()), reason=str(rng.choice(["stop", "length"])),
        version=int(rng.integers(9)),
    )  # fmt: skip


def masked(rollout):
    """Return it with a result among its drawn tokens and a second context."""
    n = len(rollout.tokens)
    trainable = np.zeros(n + 4, bool)
    trainable[rollout.n_prompt : n] = True
    tokens = np.concatenate([rollout.tokens, np.arange(4, dtype=np.int32)])
    experts = rollout.experts
    if experts is not None:
        experts = np.pad(experts, ((0, 0), (0, 4), (0, 0)))
    return dataclasses.replace(
        rollout, tokens=tokens, trainable=trainable, experts=experts, starts=(0, n + 1)
    )


def groups(rng, n, **having):
    return [
        Group(
            f"domäne {i}",
            tuple(make(rng, **having) for _ in range(2 + i)),
            tuple(rng.random(2 + i)),
        )
        for i in range(n)
    ]


def assert_equal(found, expected):
    assert [[(g.domain, g.rewards) for g in part] for part in found] == [
        [(g.domain, g.rewards) for g in part] for part in expected
    ]
    for a, b in zip(_flat(found), _flat(expected), strict=True):
        for field in dataclasses.fields(Rollout):
            mine, other = getattr(a, field.name), getattr(b, field.name)
            if field.name == "starts" or other is None or isinstance(other, str | int | float):
                assert mine == other, field.name
            else:
                parts = zip(mine, other, strict=True) if field.name == "kept" else [(mine, other)]
                for x, y in parts:
                    assert x.dtype == y.dtype, field.name
                    np.testing.assert_array_equal(x, y, err_msg=field.name)


def _flat(drawn):
    return [r for part in drawn for group in part for r in group.rollouts]


@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_what_was_drawn_comes_back_as_it_was(tmp_path, kept, experts):
    rng = np.random.default_rng(0)
    having = {"kept": kept, "experts": experts}
    drawn = [groups(rng, 3, **having), [], groups(rng, 1, **having)]

    pending.save(tmp_path / "p.npz", drawn)

    assert_equal(pending.load(tmp_path / "p.npz"), drawn)
    assert [path.name for path in tmp_path.iterdir()] == ["p.npz"]


def test_some_rollouts_may_have_what_others_lack(tmp_path):
    rng = np.random.default_rng(1)
    mixed = [
        Group("a", tuple(make(rng, kept=i % 2 == 0, experts=i > 1) for i in range(4)), (0.0,) * 4)
    ]

    pending.save(tmp_path / "p.npz", [mixed])

    assert_equal(pending.load(tmp_path / "p.npz"), [mixed])


def test_nothing_drawn_is_nothing_read(tmp_path):
    pending.save(tmp_path / "p.npz", [])
    assert pending.load(tmp_path / "p.npz") == []


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04" + b"\0" * 40])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "p.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"p\.npz holds no pending responses"):
        pending.load(tmp_path / "p.npz")


def test_a_file_that_was_cut_short_is_refused(tmp_path):
    path = tmp_path / "p.npz"
    pending.save(path, [groups(np.random.default_rng(2), 2, kept=True, experts=True)])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="holds no pending responses"):
        pending.load(path)


@pytest.mark.parametrize("experts", [True, False])
def test_episodes_of_several_turns_and_contexts_come_back_as_they_were(tmp_path, experts):
    rng = np.random.default_rng(1)
    (group,) = groups(rng, 1, kept=True, experts=experts)
    first, *others = group.rollouts
    mixed = group._replace(rollouts=(masked(first), *others))
    pending.save(tmp_path / "p.npz", [[mixed]])

    found = pending.load(tmp_path / "p.npz")

    assert_equal(found, [[mixed]])
    assert found[0][0].rollouts[0].starts == mixed.rollouts[0].starts
    assert len(found[0][0].rollouts[0].contexts) == 2
