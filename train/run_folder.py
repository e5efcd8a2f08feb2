"""A run's folder: whose it is, and whether the run in it is finished."""

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from dsv32_jax import command_line, json_files
from dsv32_jax.convert.storage import Location
from dsv32_jax.errors import UsageError
from train import overrides

CONFIG_FILE, SUMMARY_FILE, REPORT_FILE = "config.json", "summary.json", "report.md"


def is_finished(
    cfg: Any, workdir: Location, *, trained: Iterable[object], may_change: Callable[[str], bool]
) -> bool:
    """Compare a config with its folder's; write it down where nothing is trained yet or the run may go on.

    Args:
        cfg: The config of a run.
        workdir: Its folder.
        trained: Its checkpoints; the folder is anybody's while there are none.
        may_change: Whether a field, by its dotted name, may differ between two starts of one run.

    Returns:
        Whether the same run is done already.

    Raises:
        UsageError: If the folder holds a run of another config: names the first fields that differ.
    """
    path = workdir / CONFIG_FILE
    now = json.loads(json.dumps(overrides.to_json_dict(cfg)))
    if path.is_file() and any(True for _ in trained):
        before = json_files.read_object(path)
        lines = overrides.config_diff(before, now)
        changed = [line for line in lines if not may_change(line.split(":")[0])]
        if changed:
            raise UsageError(
                f"{workdir} holds a run of another config ({'; '.join(changed[:3])}); choose another --workdir"
            )
        if before == now and (workdir / SUMMARY_FILE).is_file():
            return True
    if command_line.process_index() == 0:
        (workdir / SUMMARY_FILE).unlink(missing_ok=True)
        json_files.write_json(path, now)
    return False


def show_report(workdir: Location) -> None:
    """Print a run's report, where there is one, on process 0."""
    path = workdir / REPORT_FILE
    if path.is_file() and command_line.process_index() == 0:
        sys.stdout.write("\n" + path.read_text() + "\n")
