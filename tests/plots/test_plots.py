"""Pictures hold the table's numbers, stay on the given `ax`, and are the same bytes every time."""

import math
import runpy
import sys
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from torchcalib import BinTable, bin_table, plots
from torchcalib.plots import DARK, LIGHT, confidence_histogram, ecd_curve, reliability_diagram, to_png, to_svg
from torchcalib.plots.canvas import compact

DRAWINGS = [reliability_diagram, confidence_histogram]


def table_of(probs, outcomes, n_bins=5) -> BinTable:
    return bin_table(torch.tensor(probs, dtype=torch.float64), torch.tensor(outcomes), task="binary", n_bins=n_bins)


def mixed() -> BinTable:
    """Bins of 1, 0, 3, 2 and 4 samples: above, empty, below, on and below the diagonal."""
    probs = [0.1, 0.45, 0.5, 0.55, 0.75, 0.75, 0.9, 0.9, 0.95, 0.95]
    table = table_of(probs, [1, 0, 0, 1, 1, 1, 1, 0, 1, 1])
    gap = table.gap.clone()
    gap[3] = 0.0
    frequency = table.frequency.clone()
    frequency[3] = table.confidence[3]
    return replace(table, frequency=frequency, gap=gap)


def random_table(n_bins: int, n: int = 500) -> BinTable:
    generator = torch.Generator().manual_seed(n_bins)
    probs = torch.rand(n, generator=generator, dtype=torch.float64)
    return bin_table(probs, (torch.rand(n, generator=generator) < probs).long(), task="binary", n_bins=n_bins)


def edge_case(name: str) -> BinTable:
    cases = {
        "one bin": lambda: random_table(1),
        "200 bins": lambda: random_table(200),
        "200 bins, most of them empty": lambda: random_table(200, 20),
        "all in one bin": lambda: table_of([0.99] * 7, [1] * 7, 15),
        "one sample": lambda: table_of([1.0], [0], 15),
        "no data": lambda: bin_table(torch.zeros(0), torch.zeros(0, dtype=torch.int64), task="binary"),
        "nearly all in one bin": lambda: table_of([0.01] * 9000 + [0.2, 0.5, 0.8], [0] * 9000 + [0, 1, 1], 15),
        "fractional weights": lambda: bin_table(
            torch.tensor([0.2, 0.7]), torch.tensor([0, 1]), task="binary", weights=torch.tensor([0.25, 0.003])
        ),
        "millions": lambda: bin_table(
            torch.tensor([0.2, 0.7]), torch.tensor([0, 1]), task="binary", weights=torch.tensor([3.1e9, 2.5e6])
        ),
    }
    return cases[name]()


EDGE_CASES = [
    "one bin",
    "200 bins",
    "200 bins, most of them empty",
    "all in one bin",
    "one sample",
    "no data",
    "nearly all in one bin",
    "fractional weights",
    "millions",
]


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("case", EDGE_CASES)
@pytest.mark.parametrize("draw", DRAWINGS)
def test_edge_cases_are_drawn_without_warnings(draw, case):
    ax = draw(edge_case(case), style=DARK, title="title")
    assert to_png(ax, dpi=40).startswith(b"\x89PNG")
    assert ("no data" in texts(ax)) == (case == "no data")


@pytest.mark.parametrize("draw", [*DRAWINGS, None])
def test_only_the_given_axes_are_drawn_on(draw):
    figure = Figure(facecolor="#123456")
    ax, other = figure.subplots(1, 2)
    untouched = to_svg(Figure().subplots())
    children, limits = len(other.get_children()), other.axis()
    returned = ecd_curve(ax) if draw is None else draw(mixed(), ax)
    assert returned is ax
    assert figure.axes == [ax, other]
    assert to_hex(figure.get_facecolor()) == "#123456"
    assert (len(other.get_children()), other.axis()) == (children, limits)
    assert to_svg(Figure().subplots()) == untouched


@pytest.mark.parametrize("draw", [*DRAWINGS, None])
def test_settings_of_matplotlib_and_pyplot_are_left_alone(draw):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before, open_figures = matplotlib.rcParams.copy(), pyplot.get_fignums()
    ax = ecd_curve() if draw is None else draw(mixed())
    to_svg(ax)
    to_png(ax)
    assert matplotlib.rcParams.copy() == before
    assert pyplot.get_fignums() == open_figures


@pytest.mark.parametrize("draw", [*DRAWINGS, None])
def test_same_picture_gives_the_same_bytes(draw):
    first, second = (ecd_curve() if draw is None else draw(random_table(15)) for _ in range(2))
    svg = to_svg(first)
    assert to_png(first, dpi=50) == to_png(second, dpi=50)
    assert svg == to_svg(second), "saving another format first must not change the figure"
    assert "<dc:date>" not in svg


def test_part_of_a_figure_saves_the_whole_figure():
    figure = Figure()
    left, right = figure.subfigures(1, 2)
    ax = reliability_diagram(mixed(), left.subplots())
    right.subplots().set_xlabel("on the right")
    assert "on the right" in to_svg(ax)


@pytest.mark.parametrize("draw", DRAWINGS)
def test_batch_of_tables_is_refused_and_one_of_them_drawn(draw):
    probs, outcomes = torch.rand(3, 40, dtype=torch.float64), torch.randint(0, 2, (3, 40))
    tables = bin_table(probs, outcomes, task="binary")
    with pytest.raises(ValueError, match=r"`table` must hold one series of bins, got a batch of shape \(3, 15\)\."):
        draw(tables)
    assert to_svg(draw(tables[1])) == to_svg(draw(bin_table(probs[1], outcomes[1], task="binary")))


def test_marks_are_at_mean_confidence_and_frequency_of_bins_that_hold_data():
    table = mixed()
    (marks,) = (c for c in reliability_diagram(table).collections if len(c.get_offsets()) > 1)
    held = table.n > 0
    expected = torch.stack([table.confidence, table.frequency], -1)[held]
    np.testing.assert_array_equal(marks.get_offsets(), expected)


def test_area_of_marks_grows_in_proportion_to_share():
    table = mixed()
    (marks,) = (c for c in reliability_diagram(table).collections if len(c.get_offsets()) > 1)
    share = table.share[table.n > 0].numpy()
    slope = np.diff(marks.get_sizes()) / np.diff(share)
    np.testing.assert_allclose(slope, slope[0])
    assert slope[0] > 0
    assert marks.get_sizes().min() > 0


def test_gap_runs_from_the_diagonal_to_the_mark():
    table = mixed()
    lines = next(c for c in reliability_diagram(table).collections if hasattr(c, "get_segments"))
    held = table.n > 0
    for segment, confidence, frequency in zip(
        lines.get_segments(), table.confidence[held], table.frequency[held], strict=True
    ):
        np.testing.assert_allclose(segment, [[confidence, confidence], [confidence, frequency]])


@pytest.mark.parametrize("style", [LIGHT, DARK])
def test_marks_above_are_hollow_below_filled_and_on_the_diagonal_in_ink(style):
    (marks,) = (c for c in reliability_diagram(mixed(), style=style).collections if len(c.get_offsets()) > 1)
    assert [to_hex(color) for color in marks.get_facecolors()] == [style.paper, style.below, style.ink, style.below]
    assert [to_hex(color) for color in marks.get_edgecolors()] == [style.above, style.below, style.ink, style.below]


def test_diagram_is_square_from_0_to_1_with_a_diagonal_and_units():
    ax = reliability_diagram(mixed(), title="held-out")
    assert (ax.get_xlim(), ax.get_ylim(), ax.get_aspect()) == ((0, 1), (0, 1), 1)
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[0, 0], [1, 1]]]
    assert "probability" in ax.get_xlabel()
    assert "share" in ax.get_ylabel()
    assert ax.get_title(loc="left") == "held-out"


def test_strip_shows_the_counts():
    (strip,) = reliability_diagram(mixed()).child_axes
    assert [bar.get_height() for bar in strip.patches] == [1, 0, 3, 2, 4]
    np.testing.assert_allclose([bar.get_x() for bar in strip.patches], [0, 0.2, 0.4, 0.6, 0.8])
    assert texts(strip) == ["1", "3", "2", "4"]


@pytest.mark.parametrize(("n_bins", "size"), [(30, 6.0), (15, 2.0)])
def test_counts_are_on_an_axis_where_labels_would_touch(n_bins, size):
    table = random_table(n_bins)
    (strip,) = reliability_diagram(table, Figure(figsize=(size, size)).subplots()).child_axes
    assert texts(strip) == []
    assert strip.get_yticks().tolist() == [table.n.max()]


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (7, "7"),
        (0.25, "0.25"),
        (876, "876"),
        (4466, "4.5k"),
        (9960, "10k"),
        (41557, "42k"),
        (5.1e6, "5.1M"),
        (3.1e9, "3.1G"),
    ],
)
def test_counts_are_written_short(n, expected):
    assert compact(n) == expected


def test_histogram_holds_counts_edges_and_both_means():
    table = table_of([0.1, 0.3, 0.3, 0.9], [0, 0, 1, 1])
    ax = confidence_histogram(table)
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
def test_scale_of_counts_is_said_on_the_axis(case, log, expected):
    ax = confidence_histogram(edge_case(case), log=log)
    assert ax.get_yscale() == expected
    assert ("logarithmic" in ax.get_ylabel()) == (expected == "log")


def test_smallest_bin_is_visible_on_a_logarithmic_scale():
    table = edge_case("nearly all in one bin")
    bottom, top = confidence_histogram(table).get_ylim()
    assert 0 < bottom < table.n[table.n > 0].min()
    assert top > table.n.max()


def test_ecd_minimum_closed_form_is_minus_w_of_1_over_e():
    w = -plots.ECD_MINIMUM
    assert w * math.exp(w) == pytest.approx(1 / math.e, rel=1e-15)


def test_ecd_curves_closed_form():
    ax = ecd_curve()
    curves = {line.get_label()[:5]: line for line in ax.lines if line.get_label().startswith("x = ")}
    for x in (0, 1):
        p, ecd = curves[f"x = {x}"].get_data()
        inside = (p > 0) & (p < 1)
        expected = (p[inside] - x) * np.log(p[inside] / (1 - p[inside]))
        np.testing.assert_allclose(ecd[inside], expected, rtol=1e-12, atol=1e-15)
        assert ecd[p == x] == 0
        assert np.isnan(ecd[p == 1 - x])


def test_ecd_minimum_is_marked_on_both_curves():
    marks = {line.get_label(): line.get_xydata()[0] for line in ecd_curve().lines if "minimum" in line.get_label()}
    for x, p in ((1, 0.7821882900), (0, 1 - 0.7821882900)):
        np.testing.assert_allclose(marks[f"minimum, x = {x}"], [p, -0.2784645428], atol=1e-10)


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("style", [LIGHT, DARK])
def test_text_contrast_meets_wcag_aa(style):
    for color in (style.ink, style.muted, style.above, style.below, style.rejected):
        dark, light = sorted((luminance(color), luminance(style.paper)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, color


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'torchcalib\[plot\]'"):
        runpy.run_path(plots.__file__)
