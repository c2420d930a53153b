"""The reliability diagram and the histogram of confidence hold the numbers of their table."""

import numpy as np
import pytest
import torch
from helpers.tables import bins_of, mixed_bins, random_bins, texts
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from torchcalib.plots import DARK, LIGHT, confidence_histogram, reliability_diagram, to_png

EDGE_CASES = {
    "one bin": lambda: random_bins(1),
    "200 bins": lambda: random_bins(200),
    "200 bins, most of them empty": lambda: random_bins(200, 20),
    "all in one bin": lambda: bins_of([0.99] * 7, [1] * 7, 15),
    "one sample": lambda: bins_of([1.0], [0], 15),
    "no data": lambda: bins_of([], [], 15),
    "nearly all in one bin": lambda: bins_of([0.01] * 9000 + [0.2, 0.5, 0.8], [0] * 9000 + [0, 1, 1], 15),
    "fractional weights": lambda: bins_of([0.2, 0.7], [0, 1], 15, weights=torch.tensor([0.25, 0.003])),
    "millions": lambda: bins_of([0.2, 0.7], [0, 1], 15, weights=torch.tensor([3.1e9, 2.5e6])),
}


@pytest.mark.parametrize("draw", [reliability_diagram, confidence_histogram])
def test_edge_cases_are_drawn_without_warnings(draw):
    for case, table in EDGE_CASES.items():
        ax = draw(table(), style=DARK, title="title")
        assert to_png(ax, dpi=40).startswith(b"\x89PNG")
        assert ("no data" in texts(ax)) == (case == "no data"), case


def marks_of(ax):
    (marks,) = (c for c in ax.collections if len(c.get_offsets()) > 1)
    return marks


def test_marks_are_at_mean_confidence_and_frequency_and_their_area_grows_with_the_share():
    table = mixed_bins()
    marks, held = marks_of(reliability_diagram(table)), table.n > 0
    np.testing.assert_array_equal(marks.get_offsets(), torch.stack([table.confidence, table.frequency], -1)[held])
    slope = np.diff(marks.get_sizes()) / np.diff(table.share[held].numpy())
    np.testing.assert_allclose(slope, slope[0])
    assert slope[0] > 0
    assert marks.get_sizes().min() > 0


def test_gap_runs_from_the_diagonal_to_the_mark():
    table = mixed_bins()
    lines = next(c for c in reliability_diagram(table).collections if hasattr(c, "get_segments"))
    held = table.n > 0
    expected = [[[c, c], [c, f]] for c, f in zip(table.confidence[held], table.frequency[held], strict=True)]
    np.testing.assert_allclose(lines.get_segments(), expected)


@pytest.mark.parametrize("style", [LIGHT, DARK])
def test_marks_above_are_hollow_below_filled_and_on_the_diagonal_in_ink(style):
    marks = marks_of(reliability_diagram(mixed_bins(), style=style))
    assert [to_hex(color) for color in marks.get_facecolors()] == [style.paper, style.below, style.ink, style.below]
    assert [to_hex(color) for color in marks.get_edgecolors()] == [style.above, style.below, style.ink, style.below]


def test_diagram_is_square_from_0_to_1_with_a_diagonal_units_and_a_strip_of_counts():
    ax = reliability_diagram(mixed_bins(), title="held-out")
    assert (ax.get_xlim(), ax.get_ylim(), ax.get_aspect()) == ((0, 1), (0, 1), 1)
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[0, 0], [1, 1]]]
    assert "probability" in ax.get_xlabel()
    assert "share" in ax.get_ylabel()
    assert ax.get_title(loc="left") == "held-out"
    (strip,) = ax.child_axes
    assert [bar.get_height() for bar in strip.patches] == [1, 0, 3, 2, 4]
    np.testing.assert_allclose([bar.get_x() for bar in strip.patches], [0, 0.2, 0.4, 0.6, 0.8])
    assert texts(strip) == ["1", "3", "2", "4"]


@pytest.mark.parametrize(("n_bins", "size"), [(30, 6.0), (15, 2.0)])
def test_counts_are_on_an_axis_where_labels_would_touch(n_bins, size):
    table = random_bins(n_bins)
    (strip,) = reliability_diagram(table, Figure(figsize=(size, size)).subplots()).child_axes
    assert texts(strip) == []
    assert strip.get_yticks().tolist() == [table.n.max()]


def test_histogram_holds_counts_edges_and_both_means():
    ax = confidence_histogram(bins_of([0.1, 0.3, 0.3, 0.9], [0, 0, 1, 1]))
    assert [bar.get_height() for bar in ax.patches] == [1, 2, 0, 0, 1]
    np.testing.assert_allclose([bar.get_x() for bar in ax.patches], [0, 0.2, 0.4, 0.6, 0.8])
    means = [line.get_xdata()[0] for line in ax.lines]
    np.testing.assert_allclose(means, [(0.1 + 0.3 + 0.3 + 0.9) / 4, 2 / 4])
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["mean confidence 0.400", "mean outcome 0.500"]


@pytest.mark.parametrize(
    ("case", "log", "expected"),
    [
        ("nearly all in one bin", None, "log"),
        ("nearly all in one bin", False, "linear"),
        ("all in one bin", None, "linear"),
        ("one bin", True, "log"),
        ("200 bins", None, "linear"),
    ],
)
def test_scale_of_counts_is_said_on_the_axis_and_the_smallest_bin_is_visible(case, log, expected):
    table = EDGE_CASES[case]()
    ax = confidence_histogram(table, log=log)
    assert ax.get_yscale() == expected
    assert ("logarithmic" in ax.get_ylabel()) == (expected == "log")
    bottom, top = ax.get_ylim()
    assert top > table.n.max()
    if expected == "log":
        assert 0 < bottom < table.n[table.n > 0].min()
