import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from train import checkpoint

EVERY_STEP = checkpoint.CheckpointConfig(every_steps=1, keep_last=10, keep_best=0)


def make_state(value, dim=64):
    params = {"layer": {"w": jnp.full((dim, dim), value), "b": jnp.zeros(dim, jnp.bfloat16)}}
    return {
        "params": params,
        "opt": optax.adamw(1e-3).init(params),
        "key": jax.random.key(int(value)),
    }


def abstract(state):
    return jax.eval_shape(lambda: state)


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.fixture
def opened():
    """Open folders, and close them when the test is over."""
    open_ones = []

    def open_folder(folder, cfg=EVERY_STEP):
        open_ones.append(checkpoint.Checkpoints(folder, cfg))
        return open_ones[-1]

    yield open_folder
    for one in open_ones:
        one.close()


def save_steps(saves, steps, metric=lambda step: None):
    for step in steps:
        saves.save(
            step,
            make_state(float(step)),
            data_state={"position": step},
            meta={"config": "x"},
            metric=metric(step),
        )
    saves.wait()


def biggest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_a_state_comes_back_with_its_types_and_its_json(tmp_path, opened):
    save_steps(opened(tmp_path / "checkpoints"), [3])

    restored = opened(tmp_path / "checkpoints").restore_latest(abstract(make_state(0.0)))

    assert restored.step == 3
    assert_equal(restored.state, make_state(3.0))
    assert restored.data_state == {"position": 3}
    assert restored.meta == {"config": "x"}


def test_a_folder_without_checkpoints_gives_nothing_and_is_not_made(tmp_path, opened):
    saves = opened(tmp_path / "none")

    assert saves.restore_latest(abstract(make_state(0.0))) is None
    assert saves.last_good_path is None
    assert not (tmp_path / "none").exists()


def test_the_arrays_may_be_donated_while_they_are_written(tmp_path, opened):
    saves = opened(tmp_path)
    array = jax.block_until_ready(jnp.arange(4_000_000, dtype=jnp.float32) + 0)
    expected = np.array(array)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)

    saves.save(1, {"x": array}, data_state={}, meta={})
    for _ in range(3):
        array = step(array)
    jax.block_until_ready(array)
    saves.wait()

    restored = saves.restore_step(1, {"x": jax.ShapeDtypeStruct(array.shape, array.dtype)})
    assert np.array_equal(np.asarray(restored.state["x"]), expected)


def test_a_step_between_the_intervals_is_saved_only_when_forced(tmp_path, opened):
    saves = opened(tmp_path, checkpoint.CheckpointConfig(every_steps=5))
    state = make_state(1.0)

    assert not saves.save(3, state, data_state={}, meta={})
    assert saves.save(5, state, data_state={}, meta={})
    assert saves.save(6, state, data_state={}, meta={}, force=True)
    assert not saves.save(6, state, data_state={}, meta={}, force=True)
    saves.wait()
    assert saves.steps() == [5, 6]


def test_the_last_and_the_best_stay(tmp_path, opened):
    cfg = checkpoint.CheckpointConfig(every_steps=1, keep_last=2, keep_best=1)
    metrics = {1: 3.0, 2: 0.5, 3: 2.0, 4: 1.0, 5: 1.5}

    save_steps(opened(tmp_path, cfg), [1, 2, 3], metrics.get)
    save_steps(opened(tmp_path, cfg), [4, 5], metrics.get)

    assert opened(tmp_path).steps() == [2, 4, 5]


def test_nothing_is_visible_before_it_is_whole(tmp_path, opened, monkeypatch):
    seen = []
    write = checkpoint.manifest.write_manifest

    def look(folder, **kwargs):
        seen.append((folder.name, saves.steps(), saves.last_good_path))
        write(folder, **kwargs)

    monkeypatch.setattr(checkpoint.manifest, "write_manifest", look)
    saves = opened(tmp_path)
    save_steps(saves, [1])

    assert seen == [("1.orbax-checkpoint-tmp", [], None)]
    assert saves.last_good_path == tmp_path / "1"


def truncate(step_folder):
    path = biggest_file(step_folder)
    os.truncate(path, path.stat().st_size // 2)


def flip_a_byte(step_folder):
    path = biggest_file(step_folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def delete_a_file(step_folder):
    biggest_file(step_folder).unlink()


def delete_the_manifest(step_folder):
    (step_folder / "manifest.json").unlink()


def delete_nearly_all(step_folder):
    shutil.rmtree(step_folder)
    step_folder.mkdir()


DAMAGES = [truncate, flip_a_byte, delete_a_file, delete_the_manifest, delete_nearly_all]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_passed_over_with_one_warning(tmp_path, opened, caplog, damage):
    save_steps(opened(tmp_path), [1, 2])
    file = "manifest.json" if "manifest" in damage.__name__ else biggest_file(tmp_path / "2").name
    file = "manifest.json" if damage is delete_nearly_all else file
    damage(tmp_path / "2")

    with caplog.at_level(logging.WARNING, logger="train"):
        restored = opened(tmp_path).restore_latest(abstract(make_state(0.0)))

    assert restored.step == 1
    assert_equal(restored.state, make_state(1.0))
    [warning] = [record.getMessage() for record in caplog.records if record.name[:5] == "train"]
    assert warning.startswith(f"passing over checkpoint {tmp_path}/2: ")
    assert file in warning


def test_the_run_goes_on_over_the_damaged_steps(tmp_path, opened):
    save_steps(opened(tmp_path), [1, 2, 3])
    truncate(tmp_path / "2")
    delete_the_manifest(tmp_path / "3")
    saves = opened(tmp_path)

    assert saves.restore_latest(abstract(make_state(0.0))).step == 1
    assert saves.last_good_path == tmp_path / "1"
    save_steps(saves, [2, 3])

    assert saves.steps() == [1, 2, 3]
    assert {path.name for path in tmp_path.glob("*.damaged")} == {"2.damaged", "3.damaged"}
    assert opened(tmp_path).restore_latest(abstract(make_state(0.0))).step == 3


def test_without_any_whole_step_there_is_an_error_and_no_fresh_start(tmp_path, opened):
    save_steps(opened(tmp_path), [1, 2])
    flip_a_byte(tmp_path / "1")
    delete_the_manifest(tmp_path / "2")

    with pytest.raises(
        checkpoint.CheckpointError, match=r"no checkpoint in .* is whole \(2: manif"
    ):
        opened(tmp_path).restore_latest(abstract(make_state(0.0)))

    assert opened(tmp_path).steps() == [1, 2]


def test_a_half_written_step_is_not_seen_and_is_cleared_by_the_next_save(tmp_path, opened):
    save_steps(opened(tmp_path), [1, 2])
    half = tmp_path / "7.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "2", half)

    saves = opened(tmp_path)
    assert saves.restore_latest(abstract(make_state(0.0))).step == 2
    assert half.exists(), "reading changes nothing"
    save_steps(saves, [3])

    assert not half.exists()
    assert saves.steps() == [1, 2, 3]


def test_orbaxs_own_late_metadata_is_not_needed(tmp_path, opened):
    save_steps(opened(tmp_path), [1])
    (tmp_path / "1" / "_CHECKPOINT_METADATA").write_text("junk")

    assert opened(tmp_path).restore_latest(abstract(make_state(0.0))).step == 1


def test_a_named_step_that_is_damaged_or_missing_is_an_error(tmp_path, opened):
    save_steps(opened(tmp_path), [1, 2])
    truncate(tmp_path / "2")
    saves = opened(tmp_path)

    with pytest.raises(checkpoint.CheckpointError, match=r"2 is damaged: .* bytes instead of"):
        saves.restore_step(2, abstract(make_state(0.0)))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*/7; steps there: 1, 2"):
        saves.restore_step(7, abstract(make_state(0.0)))
    assert saves.restore_step(1, abstract(make_state(0.0))).step == 1


def test_a_checkpoint_of_another_model_is_an_error_and_not_passed_over(tmp_path, opened):
    save_steps(opened(tmp_path), [1, 2])

    with pytest.raises(ValueError, match=r"model: .* is bfloat16\[64\] in the .*\[32\] here"):
        opened(tmp_path).restore_latest(abstract(make_state(0.0, dim=32)))


def test_a_part_of_the_state_can_be_restored(tmp_path, opened):
    save_steps(opened(tmp_path), [1])
    part = {"params": abstract(make_state(0.0))["params"]}

    restored = opened(tmp_path).restore_latest(part, partial=True)

    assert_equal(restored.state, {"params": make_state(1.0)["params"]})
    with pytest.raises(ValueError, match="in the checkpoint and not in the state here"):
        opened(tmp_path).restore_latest(part)


def test_a_step_of_a_longer_run_is_never_overwritten(tmp_path, opened):
    save_steps(opened(tmp_path), [1, 2])
    saves = opened(tmp_path)
    saves.restore_step(1, abstract(make_state(0.0)))

    with pytest.raises(ValueError, match=r"step 2 is in .* already, from a run that went further"):
        saves.save(2, make_state(9.0), data_state={}, meta={})

    assert_equal(saves.restore_step(2, abstract(make_state(0.0))).state, make_state(2.0))


def test_json_that_is_none_is_refused_before_anything_is_written(tmp_path, opened):
    with pytest.raises(ValueError, match="data_state must be JSON"):
        opened(tmp_path).save(1, make_state(1.0), data_state={"a": {1}}, meta={})

    assert list(tmp_path.iterdir()) == []


def test_a_synchronous_save_is_on_disk_when_it_returns(tmp_path, opened):
    cfg = checkpoint.CheckpointConfig(every_steps=1, async_save=False)
    saves = opened(tmp_path, cfg)

    saves.save(1, make_state(1.0), data_state={}, meta={})

    assert saves.last_good_path == tmp_path / "1"


def test_the_files_can_be_read_by_orbax_alone(tmp_path, opened):
    save_steps(opened(tmp_path), [1])

    reader = ocp.PyTreeCheckpointer()
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    plain = jax.tree.map(
        lambda _: as_numpy, reader.metadata(tmp_path / "1" / "state").item_metadata.tree
    )
    tree = reader.restore(tmp_path / "1" / "state", restore_args=plain)

    assert np.array_equal(tree["params"]["layer"]["w"], np.full((64, 64), 1.0))


@pytest.mark.parametrize("field", ["every_steps", "keep_last", "keep_best"])
def test_a_count_that_makes_no_sense_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}=-1 must be at least"):
        checkpoint.CheckpointConfig(**{field: -1})


MESHES = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from train import checkpoint

def sharding(count):
    mesh = jax.make_mesh((count,), ("x",), (AxisType.Auto,), devices=jax.devices()[:count])
    return NamedSharding(mesh, PartitionSpec("x"))

assert jax.device_count() == 8
saves = checkpoint.Checkpoints(Path(sys.argv[1]), checkpoint.CheckpointConfig(every_steps=1))
w = jax.device_put(jnp.arange(64.0).reshape(16, 4), sharding(8))
saves.save(1, {"w": w}, data_state={}, meta={})
wanted = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding(4))}
state = saves.restore_step(1, wanted).state if saves.wait() is None else None
assert state["w"].sharding == sharding(4), state["w"].sharding
assert np.array_equal(np.asarray(state["w"]), np.asarray(w))
saves.close()
"""


def run_python(script, *args, **env):
    command = [sys.executable, "-W", "error", "-c", script, *map(str, args)]
    root = Path(__file__).parents[2]
    return subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_checkpoint_of_8_devices_restores_on_4_and_on_1(tmp_path, opened):
    done = run_python(MESHES, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert done.returncode == 0, done.stderr

    wanted = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    restored = opened(tmp_path).restore_latest(wanted)

    assert len(restored.state["w"].sharding.device_set) == 1
    assert np.array_equal(np.asarray(restored.state["w"]), np.arange(64.0).reshape(16, 4))


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_loses_nothing_and_is_one_clear_line(small_disk, opened):
    folder = small_disk / "checkpoints"
    cfg = checkpoint.CheckpointConfig(every_steps=1, keep_last=1)
    saves = opened(folder, cfg)
    save_steps(saves, [1])
    noise = {"x": jax.random.normal(jax.random.key(0), (1_000_000,))}

    saves.save(2, noise, data_state={}, meta={})
    with pytest.raises(checkpoint.CheckpointError) as caught:
        saves.wait()

    assert str(caught.value) == (
        f"step 2 could not be saved in {folder}: the disk is full; "
        f"the last good checkpoint is {folder}/1"
    )
    assert [path.name for path in folder.iterdir()] == ["1"]
    assert_equal(saves.restore_latest(abstract(make_state(0.0))).state, make_state(1.0))
    save_steps(saves, [3])
    assert saves.steps() == [3]


def test_a_disk_that_fills_up_at_the_manifest_loses_nothing(small_disk, opened, monkeypatch):
    folder = small_disk / "checkpoints"
    saves = opened(folder)
    save_steps(saves, [1])
    write = checkpoint.manifest.write_manifest

    def write_on_a_full_disk(step_folder, **kwargs):
        with (small_disk / "filler").open("wb", buffering=0) as filler:
            filler.write(bytes(4_000_000))
        write(step_folder, **kwargs)

    monkeypatch.setattr(checkpoint.manifest, "write_manifest", write_on_a_full_disk)

    saves.save(2, make_state(2.0), data_state={}, meta={})
    with pytest.raises(checkpoint.CheckpointError, match=r"step 2 .*: the disk is full; the last"):
        saves.wait()

    assert saves.steps() == [1]
    assert [path.name for path in folder.iterdir()] == ["1"]


def poll_for_seconds(saves, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        saves.poll()


def test_a_failed_background_save_is_noticed_without_waiting(tmp_path, opened, monkeypatch):
    def fail(folder, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint.manifest, "write_manifest", fail)
    saves = opened(tmp_path)
    saves.poll()
    saves.save(1, make_state(1.0), data_state={}, meta={})

    with pytest.raises(
        checkpoint.CheckpointError, match="Input/output error; there is none before"
    ):
        poll_for_seconds(saves, 20)
