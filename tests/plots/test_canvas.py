"""Properties of every diagram: it draws on the given `ax`, changes no settings, and is reproducible."""

import io

import matplotlib
import pytest
import torch
from helpers.systems import compared as compared_systems
from helpers.tables import batch_of_blocks, in_logits, mixed_bins, simulated_blocks, small_blocks, two_binnings
from helpers.trainings import epochs_of
from matplotlib.figure import Figure

from torchcalib import plots
from torchcalib.functional import calibration_curve
from torchcalib.plots import DARK, LIGHT, to_png, to_svg

OF_BINS = [plots.reliability_diagram, plots.confidence_histogram]
OF_BLOCKS = [plots.tce_diagram, in_logits, two_binnings]
DRAWINGS = [
    *((draw, mixed_bins) for draw in OF_BINS),
    *((draw, small_blocks) for draw in OF_BLOCKS),
    (lambda _, ax=None: plots.ecd_curve(ax), lambda: None),
    (plots.difference_plot, lambda: compared_systems("binary")),
    (plots.training_curve, lambda: epochs_of([0.2, 1.1, 2.5])[0].history),
]


@pytest.mark.parametrize(("draw", "of"), DRAWINGS)
def test_diagrams_draw_only_on_the_given_axes_and_are_reproducible(draw, of):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before, open_figures = matplotlib.rcParams.copy(), pyplot.get_fignums()
    figure = Figure()
    ax, other = figure.subplots(1, 2)
    children, limits = len(other.get_children()), other.axis()
    assert draw(of(), ax=ax) is ax
    assert figure.axes == [ax, other]
    assert (len(other.get_children()), other.axis()) == (children, limits)
    first, second = draw(of()), draw(of())
    svg = to_svg(first)
    assert to_png(first, dpi=50) == to_png(second, dpi=50)
    assert svg == to_svg(second), "saving another format first must not change the figure"
    assert "<dc:date>" not in svg
    assert (matplotlib.rcParams.copy(), pyplot.get_fignums()) == (before, open_figures)


def test_saving_an_axes_of_a_subfigure_saves_the_whole_figure():
    left, right = Figure().subfigures(1, 2)
    ax = plots.reliability_diagram(mixed_bins(), ax=left.subplots())
    right.subplots().set_xlabel("on the right")
    assert "on the right" in to_svg(ax)


@pytest.mark.parametrize("draw", [*OF_BINS, *OF_BLOCKS])
def test_batches_raise_an_error_and_their_elements_are_drawn_without_padding(draw):
    if draw in OF_BLOCKS:
        batch, singles = batch_of_blocks(), [small_blocks(), simulated_blocks([60])]
    else:
        probs = torch.rand(2, 40, generator=torch.Generator().manual_seed(0))
        outcomes = (torch.arange(40) % 3).clamp(max=1)
        batch = calibration_curve(probs, outcomes.expand(2, 40), task="binary", batch_dims=1)
        singles = [calibration_curve(p, outcomes, task="binary") for p in probs]
    with pytest.raises(ValueError, match=r"must have no batch axes, got shape \(2, \d+\)\. Draw one"):
        draw(batch)
    assert [to_svg(draw(batch[k])) for k in (0, 1)] == [to_svg(draw(single)) for single in singles]


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("style", [LIGHT, DARK])
def test_text_contrast_meets_wcag_aa(style):
    for color in (style.ink, style.muted, style.above, style.below, style.rejected):
        dark, light = sorted((luminance(color), luminance(style.paper)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, color


@pytest.mark.parametrize("layout", [None, "tight", "constrained"])
def test_saved_figures_have_a_margin_around_all_texts_with_any_layout_engine(layout):
    axes = Figure(layout=layout).subplots(1, 2, squeeze=False)
    for ax in axes.flat:
        plots.ecd_curve(ax).set_title("A title")
    dark = matplotlib.image.imread(io.BytesIO(to_png(axes[0, 0], dpi=100)))[..., :3].min(-1) < 0.9
    rows, columns = dark.any(1).nonzero()[0], dark.any(0).nonzero()[0]
    assert min(rows[0], columns[0], len(dark) - 1 - rows[-1], dark.shape[1] - 1 - columns[-1]) >= 2
