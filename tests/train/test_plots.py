import math

import matplotlib as mpl
from matplotlib import image

from train import plots


def test_each_loss_becomes_one_picture(tmp_path):
    rows = [{"step": s, "loss": 1.0 / s, "loss/kl": 0.1, "mfu": 0.3} for s in range(1, 50)]

    paths = plots.plot_losses(rows, tmp_path / "plots")

    assert [path.name for path in paths] == ["loss.png", "loss_kl.png"]
    picture = image.imread(paths[0])
    assert picture.shape == (450, 800, 4)
    assert picture[..., :3].min() < 0.5, "something is drawn"


def test_gaps_and_late_series_are_no_trouble(tmp_path):
    rows = [{"step": 1, "loss": None}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": 1.0}]

    assert len(plots.plot_losses(rows, tmp_path)) == 1


def test_nothing_finite_draws_nothing(tmp_path):
    assert plots.plot_losses([{"step": 1, "loss": None}], tmp_path / "plots") == []
    assert not (tmp_path / "plots").exists()


def test_matplotlibs_settings_and_open_figures_stay_as_they_were(tmp_path):
    from matplotlib import _pylab_helpers

    before = dict(mpl.rcParams)

    plots.plot_losses([{"step": 1, "loss": 1.0}], tmp_path)

    assert dict(mpl.rcParams) == before
    assert not _pylab_helpers.Gcf.figs
