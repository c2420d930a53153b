"""Laws of every picture: it stays on the given `ax`, leaves settings alone, and is the same bytes every time."""

import runpy
import sys

import matplotlib
import pytest
import torch
from helpers.tables import batch_of_blocks, mixed_bins, simulated_blocks, small_blocks
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from torchcalib import bin_table, plots
from torchcalib.plots import DARK, LIGHT, bin_comparison, to_png, to_svg
from torchcalib.plots.canvas import compact


def in_logits(table, ax=None, **options):
    return plots.tce_diagram(table, ax, logit=True, **options)


def compared(table, ax=None, **options):
    return bin_comparison({"PAVA": table, "equal width": table}, ax, **options)


def compared_in_logits(table, ax=None, **options):
    return compared(table, ax, logit=True, **options)


def curves_of_ecd(table, ax=None, **options):
    return plots.ecd_curve(ax, **options)


OF_BINS = [plots.reliability_diagram, plots.confidence_histogram]
OF_BLOCKS = [plots.tce_diagram, in_logits, compared, compared_in_logits]
DRAWINGS = [*((draw, mixed_bins) for draw in (*OF_BINS, curves_of_ecd)), *((draw, small_blocks) for draw in OF_BLOCKS)]


@pytest.mark.parametrize(("draw", "table"), DRAWINGS)
def test_only_the_given_axes_are_drawn_on_and_settings_are_left_alone(draw, table):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before, open_figures = matplotlib.rcParams.copy(), pyplot.get_fignums()
    untouched = to_svg(Figure().subplots())
    figure = Figure(facecolor="#123456")
    ax, other = figure.subplots(1, 2)
    children, limits = len(other.get_children()), other.axis()
    assert draw(table(), ax) is ax
    assert figure.axes == [ax, other]
    assert to_hex(figure.get_facecolor()) == "#123456"
    assert (len(other.get_children()), other.axis()) == (children, limits)
    figure.draw(FigureCanvasAgg(figure).get_renderer())
    if draw in OF_BLOCKS:
        frame = ax.get_position()
        for panel in ax.child_axes:
            box = panel.get_position()
            assert frame.x0 <= box.x0 + 1e-9 < box.x1 <= frame.x1 + 1e-9
            assert frame.y0 <= box.y0 + 1e-9 < box.y1 <= frame.y1 + 1e-9
    to_png(draw(table()), dpi=50)
    assert to_svg(Figure().subplots()) == untouched
    assert matplotlib.rcParams.copy() == before
    assert pyplot.get_fignums() == open_figures


@pytest.mark.parametrize(("draw", "table"), DRAWINGS)
def test_same_picture_gives_the_same_bytes(draw, table):
    first, second = (draw(table()) for _ in range(2))
    svg = to_svg(first)
    assert to_png(first, dpi=50) == to_png(second, dpi=50)
    assert svg == to_svg(second), "saving another format first must not change the figure"
    assert "<dc:date>" not in svg


def test_part_of_a_figure_saves_the_whole_figure():
    figure = Figure()
    left, right = figure.subfigures(1, 2)
    ax = plots.reliability_diagram(mixed_bins(), left.subplots())
    right.subplots().set_xlabel("on the right")
    assert "on the right" in to_svg(ax)


@pytest.mark.parametrize("draw", OF_BINS)
def test_batch_of_bins_is_refused_and_one_of_them_drawn(draw):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(3, 40, dtype=torch.float64, generator=generator)
    outcomes = torch.randint(0, 2, (3, 40), generator=generator)
    tables = bin_table(probs, outcomes, task="binary")
    with pytest.raises(ValueError, match=r"`table` must hold one series of bins, got a batch of shape \(3, 15\)\."):
        draw(tables)
    assert to_svg(draw(tables[1])) == to_svg(draw(bin_table(probs[1], outcomes[1], task="binary")))


@pytest.mark.parametrize("draw", OF_BLOCKS)
def test_batch_of_blocks_is_refused_and_one_of_them_drawn_without_what_fills_it_up(draw):
    with pytest.raises(ValueError, match=r"must hold one series of bins, got a batch of shape \(2, 4\)\. Draw one of"):
        draw(batch_of_blocks())
    assert to_svg(draw(batch_of_blocks()[1])) == to_svg(draw(simulated_blocks([60])))
    assert to_svg(draw(batch_of_blocks()[0])) == to_svg(draw(small_blocks()))


def test_counts_are_written_short():
    written = {7: "7", 0.25: "0.25", 876: "876", 4466: "4.5k", 9960: "10k", 41557: "42k", 5.1e6: "5.1M", 3.1e9: "3.1G"}
    assert {n: compact(n) for n in written} == written


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
