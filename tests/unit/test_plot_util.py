"""The learning curve of a run."""

import json

import pytest

from diffusion_policy.common import plot_util

RECORDS = [
    {"global_step": step, "train_loss": 1.0, "loss/proposal": 0.5, "loss/probe": 0.1, "val_action_mse_error": 3.0}
    for step in range(3)
]


@pytest.fixture
def panels(monkeypatch, tmp_path):
    """Plot records -> {label of the y axis: names of its curves}."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))

    def plot(records):
        log = tmp_path / "logs.json.txt"
        log.write_text("".join(json.dumps(record) + "\n" for record in records))
        assert plot_util.plot_learning_curve(log, tmp_path / "curve.png", "idp on pusht").is_file()
        (figure,) = figures
        assert figure.get_suptitle() == "idp on pusht"
        assert all(axis.get_xlabel() == "training step" for axis in figure.axes)
        return {axis.get_ylabel(): [line.get_label() for line in axis.lines] for axis in figure.axes}

    return plot


def test_terms_of_the_loss_and_the_held_out_error_have_their_own_panels(panels):
    assert panels(RECORDS) == {
        "loss": ["training"],
        "terms of the loss, unweighted": ["probe", "proposal"],
        "action error (mean square, data units)": ["held-out episodes"],
    }


def test_scores_of_all_sets_of_starts(panels):
    shown = panels([{"global_step": 0, "train_loss": 1.0, "test/mean_score": 0.5, "heldout/mean_score": 0.4}])
    assert shown["mean score"] == ["heldout starts", "test starts"]


def test_numbers_on_an_axis_differ(monkeypatch, panels):
    from matplotlib.figure import Figure

    labels = {}
    save = Figure.savefig

    def keep(figure, *a, **k):
        save(figure, *a, **k)
        for axis in figure.axes:
            low, high = axis.get_ylim()
            ticks = [*axis.yaxis.get_major_ticks(), *axis.yaxis.get_minor_ticks()]
            seen = [tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high]
            labels[axis.get_ylabel()] = [text for text in seen if text]

    monkeypatch.setattr(Figure, "savefig", keep)
    panels(
        [
            {"global_step": step, "train_loss": 10.0**-step, "train_action_mse_error": 38540 - 5 * step}
            for step in range(4)
        ]
    )
    assert len(labels) == 2
    for shown in labels.values():
        assert len(set(shown)) == len(shown) > 2


def test_an_empty_log(panels):
    assert panels([]) == {"loss": []}
