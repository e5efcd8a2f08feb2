import json
import threading
from collections import Counter

import pytest
from etils import epath

from dsv32_jax import errors
from dsv32_jax.convert import journal, storage, workers
from dsv32_jax.convert.storage import Written
from dsv32_jax.convert.workers import Items, Workers

SIZES = {f"tensor {i}": size for i, size in enumerate([5, 1, 1, 1, 1, 1, 30, 2, 2, 2])}


def items_in(folder, made=None):
    def make(name):
        if made is not None:
            made.append(name)
        storage.write(folder / name, b"x" * SIZES[name])
        return {name: storage.measure(folder / name)}

    return Items(folder=folder, sizes=SIZES, files=lambda name: {name: SIZES[name]}, make=make)


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_each_item_has_one_process(tmp_path, count):
    items = items_in(epath.Path(tmp_path))

    shares = [items.share(Workers(process_index=i, process_count=count)) for i in range(count)]

    assert Counter(name for share in shares for name in share) == Counter(list(SIZES))


def test_shares_are_of_about_equal_bytes(tmp_path):
    items = Items(
        folder=epath.Path(tmp_path), sizes={str(i): 10 for i in range(99)}, files=dict, make=dict
    )

    sizes = [len(items.share(Workers(process_index=i, process_count=4))) for i in range(4)]

    assert max(sizes) - min(sizes) <= 1


def begin(folder, **identity):
    notes = journal.Journal(folder, flush_seconds=0.0)
    notes.begin(identity)
    return notes


def test_what_is_done_is_not_done_again(tmp_path):
    folder = epath.Path(tmp_path / "dst")
    made: list[str] = []
    items = items_in(folder, made)
    notes = begin(folder)
    for name in ("tensor 3", "tensor 6"):
        notes.add(name, items.make(name))
    made.clear()

    done_before = workers.do_share(items, begin(folder), Workers(threads=1))

    assert done_before == 2
    assert made == [name for name in SIZES if name not in ("tensor 3", "tensor 6")]
    files, verified = journal.Journal(folder).finished()
    assert files.keys() == verified == SIZES.keys()
    assert workers.collect(items, notes).keys() == SIZES.keys()


def test_a_file_that_is_gone_since_is_made_again(tmp_path):
    folder = epath.Path(tmp_path / "dst")
    items = items_in(folder)
    notes = begin(folder)
    notes.add("tensor 6", items.make("tensor 6"))
    (folder / "tensor 6").unlink()

    workers.do_share(items, notes, Workers(threads=1))

    assert (folder / "tensor 6").read_bytes() == b"x" * 30


@pytest.mark.parametrize("line", ["{", "[]", '{"item": "x"}', '{"item": "x", "files": [1]}'])
def test_a_damaged_note_is_named(tmp_path, line):
    notes = begin(epath.Path(tmp_path / "dst"))
    (tmp_path / "dst" / "conversion" / "1.jsonl").write_text(line)

    with pytest.raises(errors.WorkFailedError, match=r"1\.jsonl is damaged; remove \S+/dst to con"):
        notes.finished()


def test_a_disk_that_never_holds_what_was_written_ends_the_work(tmp_path):
    folder = epath.Path(tmp_path / "dst")
    good = items_in(folder)

    def make(name):
        written = good.make(name)
        if name == "tensor 6":
            storage.write(folder / name, b"y" * SIZES[name])
        return written

    items = Items(folder=folder, sizes=SIZES, files=good.files, make=make)

    message = "tensor 6: .*its checksum differs.*though it was written twice"
    with pytest.raises(errors.WorkFailedError, match=message):
        workers.do_share(items, begin(folder), Workers(threads=2))


def test_of_several_damaged_files_the_first_in_the_order_is_told(tmp_path, monkeypatch):
    items = items_in(epath.Path(tmp_path))
    last_is_found = threading.Event()

    def find_damage(folder, name, want):
        if name == "tensor 9":
            last_is_found.set()
        else:
            assert last_is_found.wait(10)
        return f"{name} is damaged" if name in ("tensor 9", "tensor 5", "tensor 8") else None

    monkeypatch.setattr(storage, "find_damage", find_damage)
    written = {name: items.make(name) for name in SIZES}

    found = workers.find_damaged(items, written, threads=len(SIZES))

    assert list(found) == ["tensor 5", "tensor 8", "tensor 9"]


def test_only_a_damaged_file_is_made_and_read_again(tmp_path, monkeypatch):
    folder = epath.Path(tmp_path / "dst")
    made: list[str] = []
    read: list[str] = []
    good = items_in(folder, made)

    def make(name):
        written = good.make(name)
        if name == "tensor 6" and made.count(name) == 1:
            storage.write(folder / name, b"y" * SIZES[name])
        return written

    def find_damage(folder, name, want):
        read.append(name)
        return find_damage_for_real(folder, name, want)

    find_damage_for_real = storage.find_damage
    monkeypatch.setattr(storage, "find_damage", find_damage)
    items = Items(folder=folder, sizes=SIZES, files=good.files, make=make)

    workers.do_share(items, begin(folder), Workers(threads=2))

    assert Counter(made) == Counter(read) == Counter([*SIZES, "tensor 6"])
    assert journal.Journal(folder).finished()[1] == SIZES.keys()


def test_a_journal_is_bound_to_what_it_was_begun_with(tmp_path):
    folder = epath.Path(tmp_path / "dst")
    begin(folder, source="a", dtype="fp8")

    begin(folder, source="a", dtype="fp8")
    with pytest.raises(errors.UsageError, match=r"options \(dtype, seed changed\)"):
        begin(folder, source="a", dtype="bf16", seed=3)


def test_notes_of_several_processes_are_read_together_the_last_one_counting(tmp_path):
    folder = epath.Path(tmp_path / "dst")
    begin(folder).add("a", {"x": Written(1, 2)})
    other = begin(folder)
    other.add("b", {"y": Written(3, 4)})
    other.add_verified(["b"])
    other.add("b", {"y": Written(5, 6)})

    files, verified = journal.Journal(folder).finished()

    assert files == {"a": {"x": Written(1, 2)}, "b": {"y": Written(5, 6)}}
    assert verified == {"b"}


def test_lines_wait_for_each_other_and_none_is_lost_at_the_end(tmp_path):
    folder = epath.Path(tmp_path / "dst")
    notes = journal.Journal(folder, flush_seconds=1000.0)
    notes.begin({})
    for i in range(5):
        notes.add(str(i), {})
    assert journal.Journal(folder).finished()[0] == {}

    notes.flush()

    lines = [p for p in (folder / "conversion").iterdir() if p.suffix == ".jsonl"]
    assert len(lines) == 1
    assert [json.loads(line)["item"] for line in lines[0].read_text().splitlines()] == list("01234")
    notes.clear()
    assert [p.name for p in (folder / "conversion").iterdir()] == ["plan.json"]
