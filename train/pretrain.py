"""Continued pre-training: dense base, indexer warm-up, sparse training, and the evidence that it worked."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsv32_jax import command_line, joining, json_files, sharding
from dsv32_jax.convert.storage import Location
from dsv32_jax.parameters import Parameters
from train import command, evidence, hosts, report, run_folder
from train.data import loader, mixture
from train.data.corpus import Corpus, open_corpora
from train.loop import Leg, LegResult, run_leg
from train.recall import RecallSums
from train.run_config import EvidenceConfig, RunConfig
from train.run_folder import REPORT_FILE, SUMMARY_FILE
from train.start import Start, find_start, restore_parameters

logger = logging.getLogger("train.pretrain")  # as a command __name__ is __main__

ABOUT = command.CommandHelp(
    name="python -m train.pretrain",
    summary="Train a DeepSeek-V3.2 model: a dense base, the indexer's warm-up, then sparse training. "
    "The config names the stages; those not yet in the workdir are run in order, and a run that was stopped goes on.",
    examples="""
    python -m train.pretrain --config sparse.py
    python -m train.pretrain --config dense.py --workdir runs/base model.dim=256 dense.steps=2000
    python -m train.pretrain --config sparse.py init_from=runs/warmup --workdir runs/sparse2
    python -m train.pretrain --config v32_671b_sparse.py init_from=DIR distributed=true mesh.ici_expert=16
    """,
)
# What may change between two starts of one run: where it runs and how it is watched, not what it computes.
CHANGEABLE = ("mesh", "checkpoint", "metrics", "guard", "evidence", "distributed")


def main(cfg: RunConfig, workdir: Location) -> int:
    """Run every stage of the config that is not done, then measure.

    Args:
        cfg: The run.
        workdir: The run's folder: the last stage's metrics and checkpoints, the earlier stages and the controls under
            `stages/`, `summary.json`, `report.md` and `plots/`.

    Returns:
        0.

    Raises:
        UsageError: If the workdir holds a run of another config, or the config does not fit the devices, the text or
            the run it starts from.
    """
    began = time.monotonic()
    if cfg.distributed:
        joining.join()
    if _is_finished(cfg, workdir):
        logger.info("this run is finished")
        run_folder.show_report(workdir)
        return 0
    with command_line.wrong_usage():
        mesh = sharding.make_mesh(cfg.mesh)
        cfg.check_mesh(mesh)
        start = find_start(cfg, mesh)
        corpora = open_corpora(cfg.data)
        mixture.check_vocab(corpora, cfg.model.vocab_size)
        held_out = None if cfg.evidence is None else _held_out_rows(cfg, cfg.evidence, corpora)
    with hosts.losses_named(), jax.set_mesh(mesh):
        legs = legs_of(cfg, workdir, start)
        results = _run_stages(cfg, mesh, corpora, legs, start)
        figures: dict[str, Any] = {}
        if cfg.evidence is not None and held_out is not None:
            figures = _gather_evidence(cfg, cfg.evidence, mesh, held_out, legs, start)
    figures |= {f"tokens_per_s/{name}": result.tokens_per_s for name, result in results.items()}
    earlier = sum(result.seconds_before for result in results.values())
    figures["wall_s"] = earlier + time.monotonic() - began
    if command_line.process_index() == 0:
        json_files.write_json(workdir / SUMMARY_FILE, figures)
        if cfg.evidence is not None:
            drawn = legs + (control_legs(cfg, workdir) if cfg.evidence.controls else [])
            _write_report(cfg.evidence, workdir, evidence.layer_names(cfg.model), drawn, figures)
    run_folder.show_report(workdir)
    return 0


def _is_finished(cfg: RunConfig, workdir: Location) -> bool:
    trained = (*workdir.glob("checkpoints/*"), *workdir.glob("stages/*/checkpoints/*"))

    def may_change(field: str) -> bool:
        return field.split(".")[0] in CHANGEABLE or field == f"{cfg.stages[-1]}.steps"

    return run_folder.is_finished(cfg, workdir, trained=trained, may_change=may_change)


def legs_of(cfg: RunConfig, workdir: Location, start: Start) -> list[Leg]:
    """List the stages to run in order; the last one's folder is the run's.

    Args:
        cfg: The run.
        workdir: The run's folder.
        start: Where it begins; the stages up to `start.done` are not run, the last one always is.

    Returns:
        The legs.
    """
    stages = cfg.stages
    if start.done in stages:
        stages = stages[stages.index(start.done) + 1 :] or stages[-1:]
    if start.done == "dense" and stages[0] == "sparse":
        logger.warning("the sparse stage starts from a dense run: its indexer has had no warm-up")
    return [
        Leg(
            name=stage,
            stage=stage,
            config=cfg.stage_config(stage),
            data=cfg.stage_data(stage),
            folder=workdir if stage == cfg.stages[-1] else workdir / "stages" / stage,
        )
        for stage in stages
    ]


def control_legs(cfg: RunConfig, workdir: Location) -> list[Leg]:
    """List the controls: the sparse stage's steps, rates and tokens, under other attention and without an indexer.

    Args:
        cfg: The run.
        workdir: The run's folder.

    Returns:
        The legs "dense_control" and "window_control".
    """
    config, data = cfg.stage_config("sparse"), cfg.stage_data("sparse")
    folder = workdir / "stages"
    return [
        Leg("dense_control", "dense", config, data, folder / "dense_control"),
        Leg("window_control", "window", config, data, folder / "window_control"),
    ]


def _run_stages(
    cfg: RunConfig, mesh: Mesh, corpora: Sequence[Corpus], legs: list[Leg], start: Start
) -> dict[str, LegResult]:
    """Run the stages one from the other, then the controls from where the last stage began."""
    results: dict[str, LegResult] = {}
    loads = [start.load, *(_restoring(cfg, leg.folder, mesh) for leg in legs)]
    todo = list(zip(legs, loads, strict=False))
    if cfg.evidence is not None and cfg.evidence.controls:
        todo += [(leg, loads[len(legs) - 1]) for leg in control_legs(cfg, legs[-1].folder)]
    for leg, load in todo:
        logger.info("%s: %d steps of %d rows", leg.name, leg.config.steps, leg.data.batch_size)
        results[leg.name] = run_leg(cfg, leg, mesh, corpora, load)
    return results


def _restoring(cfg: RunConfig, folder: Location, mesh: Mesh) -> Callable[[], Parameters]:
    return lambda: restore_parameters(cfg, folder, mesh)


def _held_out_rows(
    cfg: RunConfig, settings: EvidenceConfig, corpora: Sequence[Corpus]
) -> loader.Batch:
    """Return the rows to measure on, found before hours are spent on training."""
    data, topk = cfg.stage_data("sparse"), cfg.model.indexer.topk
    rows = loader.heldout_rows(data, settings.rows, vocab_size=cfg.model.vocab_size, opened=corpora)
    if not evidence.beyond_topk(jnp.asarray(rows["segment_ids"]), topk).any():
        raise ValueError(
            f"evidence: no held-out document has more than model.indexer.topk={topk} tokens, "
            "so that nothing is ever left out"
        )
    return rows


def _gather_evidence(
    cfg: RunConfig,
    settings: EvidenceConfig,
    mesh: Mesh,
    rows: loader.Batch,
    legs: list[Leg],
    start: Start,
) -> dict[str, float]:
    """Measure the models of all legs on held-out text, one model in memory at a time."""
    loads = {leg.name: _restoring(cfg, leg.folder, mesh) for leg in legs}
    if start.done in ("dense", "warmup"):
        loads.setdefault(start.done, start.load)
    if settings.controls:
        controls = control_legs(cfg, legs[-1].folder)
        loads |= {leg.name: _restoring(cfg, leg.folder, mesh) for leg in controls}
    losses: dict[str, evidence.RowLosses] = {}
    recalls: dict[str, RecallSums] = {}
    for name, load in loads.items():
        logger.info("measuring the model after %s on %d held-out rows", name, settings.rows)
        params = load()
        for loss_name, (leg_names, mode) in evidence.LOSSES.items():
            if name in leg_names and loss_name not in losses:
                losses[loss_name] = evidence.row_losses(
                    cfg.model, params, mode, rows, settings.rows_per_batch, mesh
                )
        if name in ("dense", "warmup", "sparse"):
            recalls[name] = evidence.recall_by_layer(cfg.model, params, rows, settings, mesh)
    return (
        evidence.loss_figures(losses)
        | evidence.recall_figures(cfg.model, recalls.get("warmup"), recalls["sparse"])
        | evidence.kl_figures(cfg.model, recalls.get("dense"), recalls.get("warmup"))
    )


def _write_report(
    settings: EvidenceConfig,
    workdir: Location,
    layers: list[str],
    legs: list[Leg],
    figures: dict[str, float],
) -> None:
    """Write report.md and the figure."""
    text = report.report_text(figures, layers, settings.caveat)
    json_files.replace_text(workdir / REPORT_FILE, text)
    report.draw(
        figures, layers, {leg.name: leg.folder for leg in legs}, workdir / "plots" / "evidence.png"
    )


if __name__ == "__main__":
    sys.exit(command.run_command(main, about=ABOUT))
