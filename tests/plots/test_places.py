"""Diagrams on axes of the caller: everything is within the place of the axes, for every layout and size."""

import numpy as np
import pytest
import torch
from helpers.systems import compared
from helpers.tables import mixed_bins, small_blocks, two_binnings
from helpers.trainings import epochs_of
from matplotlib.figure import Figure

import torchcalib as tc
from torchcalib import plots
from torchcalib.plots.canvas import Place

GENERATOR = torch.Generator().manual_seed(0)
PROBS = torch.rand(400, 4, generator=GENERATOR, dtype=torch.float64).softmax(-1)
LABELS = torch.multinomial(PROBS, 1, generator=GENERATOR).squeeze(-1)
SYSTEMS = {"a system with a long name": PROBS, "another": PROBS.square() / PROBS.square().sum(-1, keepdim=True)}
BINARY = {name: probs[:, 0] for name, probs in SYSTEMS.items()}
SCORES = {"raw": {"NCE": 0.9, "NBS": 0.8}, "calibrated": {"NCE": 0.7, "NBS": 0.6}}
IS_FIRST = (LABELS == 0).long()


def of_images():
    metric = tc.ECE(num_classes=4, mode="classwise", per_image=True)
    metric.update(PROBS.view(8, 50, 4), LABELS.view(8, 50))
    return metric


DIAGRAMS = {
    "bins": lambda ax: plots.reliability_diagram(mixed_bins(), ax=ax, title="A title"),
    "systems": lambda ax: plots.reliability_diagram(SYSTEMS, LABELS, ax=ax),
    "smooth": lambda ax: plots.reliability_diagram(BINARY, IS_FIRST, ax=ax, smooth=True),
    "corp": lambda ax: plots.corp_diagram(BINARY["another"], IS_FIRST, ax=ax),
    "histogram": lambda ax: plots.confidence_histogram(mixed_bins(), ax=ax),
    "tested": lambda ax: plots.tce_diagram(small_blocks(), ax=ax),
    "classes": lambda ax: plots.classwise_reliability_diagrams(PROBS, LABELS, ax=ax),
    "binnings": lambda ax: two_binnings(small_blocks(), ax=ax),
    "differences": lambda ax: plots.difference_plot(compared("binary"), ax=ax),
    "slices": lambda ax: tc.slices(BINARY["another"], IS_FIRST, {"a long name": IS_FIRST}, min_size=1).plot(ax),
    "ecd": lambda ax: plots.ecd_curve(ax),
    "coverage": lambda ax: plots.risk_coverage_curve(SYSTEMS, LABELS, ax=ax),
    "risk": lambda ax: plots.bayes_risk_diagram(BINARY, IS_FIRST, ax=ax),
    "scores": lambda ax: plots.score_chart(SCORES, ax),
    "images": lambda ax: plots.reliability_histogram(of_images(), ax, title="A title"),
    "training": lambda ax: plots.training_curve(epochs_of([0.2, 1.1, 2.5])[0].history, ax),
}


def drawn_box(ax):
    """Return the rectangle of everything that is drawn for the axes, in points."""
    return np.array(ax.get_tightbbox().get_points()) * 72 / ax.figure.dpi


def assert_within_place(ax):
    (low, high), place = drawn_box(ax), Place.of(ax).box()
    assert (low > place.min - 1.5).all(), (low, place)
    assert (high < place.max + 1.5).all(), (high, place)


PLACES = {
    "grid": lambda: Figure().subplots(2, 3)[0, 1],
    "inset": lambda: Figure().subplots(2, 3)[1, 2].inset_axes((0.2, 0.1, 0.8, 0.85)),
    "small": lambda: Figure(figsize=(2, 2)).subplots(),
    "wide": lambda: Figure(figsize=(6, 2)).subplots(),
}
IN_PLACES = [
    pytest.param(name, place, marks=[pytest.mark.extended] * ((i + j) % 4 > 0))
    for i, name in enumerate(DIAGRAMS)
    for j, place in enumerate(PLACES)
]


@pytest.mark.parametrize(("name", "place"), IN_PLACES)
def test_every_diagram_stays_within_its_place_in_grids_insets_and_small_figures(name, place):
    ax = PLACES[place]()
    others = [other for other in ax.figure.axes if other is not ax]
    before = [other.get_position().bounds for other in others]
    DIAGRAMS[name](ax)
    ax.figure.draw_without_rendering()
    assert_within_place(ax)
    assert [other.get_position().bounds for other in others] == before


@pytest.mark.parametrize("layout", [None, "tight", "constrained"])
def test_reliability_diagrams_fill_a_mosaic_without_overlaps_for_every_layout(layout):
    figure = Figure(figsize=(8, 6), layout=layout)
    axes = figure.subplot_mosaic([["wide", "wide"], ["left", "right"]])
    for key, name in (("wide", "bins"), ("left", "systems"), ("right", "smooth")):
        DIAGRAMS[name](axes[key])
    axes["left"].set_title("A title of the caller")
    figure.draw_without_rendering()
    boxes = [drawn_box(ax) for ax in axes.values()]
    for ax, (low, high) in zip(axes.values(), boxes, strict=True):
        assert_within_place(ax)
        assert np.prod(high - low) > 0.5 * np.prod(Place.of(ax).box().size)
        strip = next(child for child in ax.child_axes if child.get_label() == "counts")
        assert strip.get_window_extent().height > 0.1 * ax.get_window_extent().height
    for k, (low, high) in enumerate(boxes):
        assert (low > -1.5).all()
        assert (high < 72 * figure.get_size_inches() + 1.5).all()
        assert all((low > other[1] - 1.5).any() or (high < other[0] + 1.5).any() for other in boxes[:k])


def test_a_diagram_on_the_only_axes_of_a_figure_leaves_no_third_of_them_empty():
    ax = DIAGRAMS["bins"](Figure().subplots())
    (low, high), place = drawn_box(ax), Place.of(ax).box()
    assert ((high - low) > 0.8 * place.size).all()
