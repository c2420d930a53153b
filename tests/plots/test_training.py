"""The training curve holds the history and marks what matters."""

import math

import pytest
from helpers.tables import texts
from helpers.trainings import epochs_of

from torchcalib.monitoring import History, HistoryRow
from torchcalib.plots import DARK, to_svg, training_curve


def test_the_curve_holds_the_history_and_marks_what_matters():
    monitor, _ = epochs_of([0.2, 1.1, 2.5, 3.0])
    ax = training_curve(monitor.history, title="title")
    lines = {line.get_label(): line for panel in ax.child_axes for line in panel.lines}
    for name, key in (("NLL", "nll"), ("ECD", "ecd"), ("accuracy", "accuracy"), ("ECE", "ece")):
        assert tuple(lines[name].get_xdata()) == (1, 2, 3, 4)
        assert tuple(lines[name].get_ydata()) == monitor.history.column(key)
    said = [said for panel in ax.child_axes for said in texts(panel)]
    assert {"least NLL, epoch 2", "warning, epoch 3"} <= set(said)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [HistoryRow(1, 1, {"nll": 0.5, "ecd": 0.1})],
        [HistoryRow(1, 1, {"nll": math.inf, "ecd": math.inf}), HistoryRow(2, 2, {"nll": 1.0, "ecd": math.nan})],
        [HistoryRow(0, 10, {"ece": 0.1}), HistoryRow(0, 20, {"ece": 0.2}, "so many words")],
        [HistoryRow(1, 1, {"other": 1.0})],
        [HistoryRow(k, k, {"nll": 1 / (1 + k), "accuracy": 0.5, "confidence": 0.6}) for k in range(100)],
    ],
)
def test_odd_histories_are_drawn_without_warnings(rows):
    ax = training_curve(History(tuple(rows)), style=DARK)
    assert "<svg" in to_svg(ax)
    assert bool(ax.texts) == (not rows or "other" in rows[0].values)
