"""Measure how much memory and time a conversion takes: official FP8 -> Orbax -> official FP8, with the released shapes.

    python benchmarks/convert_memory.py --folder /tmp/convert --experts 160
    python benchmarks/convert_memory.py --folder /tmp/convert --released

The first makes about 23 GB of official files (every tensor of the released model's shape, but one plain layer, one
expert layer and the MTP layer only), converts them both ways in processes of their own, and prints a table. The source
is written out, not sparse, and larger than what fits beside the page cache of a small machine; it is removed before the
way back, so the folder needs twice its size. Peak memory is the process's own largest resident set, as the kernel has
it. The second plans the conversion of the whole released model, 689 GB, from files that are headers and holes.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import shutil
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from etils import epath

from dsv32_jax import config
from dsv32_jax.convert import from_hf, official_config, safetensors_io, slots, to_hf

SHARD_BYTES = 4 << 30
PATTERN_BYTES = 64 << 20
CODES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="scratch; must not exist")
    parser.add_argument("--experts", type=int, default=160, help="in each of two expert layers")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", default="fp8", help="of the checkpoint")
    parser.add_argument("--released", action="store_true", help="plan the whole model")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {time.ctime()}")
    try:
        if args.released:
            plan_released(args.folder)
        else:
            measure(args)
    finally:
        shutil.rmtree(args.folder)


def measure(args: argparse.Namespace) -> None:
    """Convert both ways and print what each took."""
    model = config.v32_671b()
    moe = dataclasses.replace(model.moe, n_experts=args.experts)
    model = dataclasses.replace(model, n_layers=2, n_dense_layers=1, moe=moe)
    folder = args.folder
    begun = time.monotonic()
    size = make_official(folder / "official", model, holes=False)
    print(f"made {size / 1e9:.1f} GB of official files in {time.monotonic() - begun:.0f} s")
    print(
        f"{'step':<9} {'written':>9} {'seconds':>8} {'GB/s':>6} {'GB/s a core':>12} {'peak RSS':>9}"
    )
    options = ["--threads", str(args.threads)]
    run("from-hf", folder / "official", folder / "orbax", [*options, "--dtype", args.dtype])
    shutil.rmtree(folder / "official")
    run("to-hf", folder / "orbax", folder / "back", [*options, "--dtype", "fp8"])


def run(direction: str, source: Path, target: Path, options: list[str]) -> None:
    """Run the command in a process of its own; print its line of the table."""
    command = [sys.executable, "-m", "dsv32_jax.convert", direction, str(source), str(target)]
    begun = time.monotonic()
    pid = os.posix_spawn(sys.executable, [*command, *options], dict(os.environ))
    _, status, usage = os.wait4(pid, 0)
    seconds = time.monotonic() - begun
    if status:
        raise SystemExit(f"{direction} ended with status {os.waitstatus_to_exitcode(status)}")
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    busy = usage.ru_utime + usage.ru_stime
    print(
        f"{direction:<9} {size / 1e9:>6.1f} GB {seconds:>8.0f} {size / seconds / 1e9:>6.2f} "
        f"{size / busy / 1e9:>12.2f} {usage.ru_maxrss / 2**20:>6.2f} GB"
    )


def make_official(folder: Path, model: config.ModelConfig, *, holes: bool) -> int:
    """Write official FP8 files; return their bytes."""
    folder.mkdir()
    table = slots.slots(model)
    weights: dict[str, tuple[str, tuple[int, ...]]] = {}
    scales: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, slot in table.items():
        kind = "F8_E4M3" if slot.quantised else "F32" if len(slot.own) == 1 else "BF16"
        weights[name] = (kind, slot.official)
        if slot.quantised:
            scales[name + slots.SCALE_SUFFIX] = ("F32", slot.scale_shape[-2:])
    files: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    held = 0
    for name, entry in weights.items():
        size = math.prod(entry[1]) * safetensors_io.DTYPES[entry[0]].itemsize
        if held + size > SHARD_BYTES:
            files.append({})
            held = 0
        files[-1][name] = entry
        held += size
    files.append(scales)  # in a file of their own, away from all weights
    weight_map, total = {}, 0
    pattern = random_codes()
    for number, tensors in enumerate(files, start=1):
        path = folder / f"model-{number:05d}-of-{len(files):06d}.safetensors"
        weight_map |= dict.fromkeys(tensors, path.name)
        total += write(path, tensors, pattern, holes=holes and tensors is not scales)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = official_config.official_config(model, "fp8")
    (folder / "config.json").write_text(json.dumps(raw))
    return total


def random_codes() -> np.ndarray:
    """Return bytes that are finite as e4m3 and, two by two, as bf16."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 0x70, PATTERN_BYTES, np.uint8)


def write(path: Path, tensors: dict, pattern: np.ndarray, *, holes: bool) -> int:
    """Write one file, its FP8 and bf16 tensors a repeated pattern or a hole, its float32 ones ones."""
    with path.open("wb") as file:
        file.write(safetensors_io.header_bytes(tensors))
        for kind, shape in tensors.values():
            size = math.prod(shape) * safetensors_io.DTYPES[kind].itemsize
            if kind == "F32":
                file.write(np.ones(shape, np.float32).tobytes())
            elif holes:
                file.seek(size, os.SEEK_CUR)
            else:
                for begin in range(0, size, len(pattern)):
                    file.write(pattern[: min(len(pattern), size - begin)].data)
        file.truncate(file.tell())
    return path.stat().st_size


def plan_released(folder: Path) -> None:
    """Check and plan the conversion of the whole model; read headers, write nothing."""
    model = config.v32_671b()
    size = make_official(folder / "official", model, holes=True)
    source, target = epath.Path(folder / "official"), epath.Path(folder / "orbax")
    begun = time.monotonic()
    job = from_hf.check(source, target, from_hf.Options())
    n_files = sum(len(job.layout.files(name)) for name in job.layout.table)
    seconds = time.monotonic() - begun
    peak = peak_gb()
    print(f"{size / 1e9:.1f} GB in {len(list(folder.glob('official/*.safetensors')))} files")
    print(f"planned {len(job.found)} tensors, {n_files} chunks in {seconds:.0f} s, {peak:.2f} GB")
    assert to_hf.SHARD_GB == SHARD_BYTES / 2**30


def peak_gb() -> float:
    """Return this process's largest resident set so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**20
    return float("nan")


if __name__ == "__main__":
    main()
