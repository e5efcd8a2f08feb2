import pytest

from train import report

LAYERS = ["layer_0", "mtp"]


@pytest.fixture
def figures():
    made = {}
    for i, name in enumerate(report.LOSSES):
        made[f"lm_loss/{name}"], made[f"lm_loss/{name}_stderr"] = 2.0 + i / 10, 0.01
    for first, second in report.GAPS:
        for kind, value in (("gap", 0.0123), ("gap_beyond_topk", -0.5)):
            made[f"{kind}/{first}-{second}"], made[f"{kind}/{first}-{second}_stderr"] = value, 0.002
    for layer in LAYERS:
        for choice in ("random", "window", "indexer", "oracle", "normalised"):
            made[f"recall/{layer}/{choice}"] = 0.25
        for kind in ("first", "last", "uniform"):
            made[f"kl/{layer}/{kind}"] = 0.75
    return made | {"gap_closed_by_warmup": 0.875}


def test_the_report_has_every_loss_gap_and_layer_and_ends_in_the_caveat(figures):
    text = report.report_text(figures, LAYERS, "Too small to show much.")

    for i, label in enumerate(report.LABELS.values()):
        assert f"| {label} | {2 + i / 10:.4f} ± 0.0100 |" in text
    assert text.count("| +1.23% ± 0.20% | -50.00% ± 0.20% |") == len(report.GAPS)
    assert "the warm-up closes 87.5%" in text
    assert "| mtp | 0.250 | 0.250 | 0.250 | 0.250 | 0.250 | 0.750 | 0.750 | 0.750 |" in text
    assert text.endswith("\n\nToo small to show much.\n")


def test_what_was_not_measured_leaves_no_row_and_an_empty_cell(figures):
    kept = {
        name: value
        for name, value in figures.items()
        if "untrained" not in name and "/first" not in name and name != "gap_closed_by_warmup"
    }

    text = report.report_text(kept, LAYERS, "")

    assert "untrained indexer" not in text
    assert "| mtp | 0.250 | 0.250 | 0.250 | 0.250 | 0.250 |  | 0.750 | 0.750 |" in text


def test_every_loss_has_a_label_and_every_choice_a_colour():
    assert set(report.LABELS) == set(report.LOSSES)
    assert set(report.COLOURS) == set(report.CHOICES)


def test_the_figure_is_drawn_from_the_legs_metrics(figures, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "lm": 3.0, "kl": 0.5}\n{"step": 2, "lm": 2.5, "kl": 0.4}\n'
    )

    report.draw(figures, LAYERS, {"sparse": tmp_path}, tmp_path / "plots" / "evidence.png")

    picture = (tmp_path / "plots" / "evidence.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
