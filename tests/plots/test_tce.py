"""Pictures of tested bins: they hold the tables' numbers, and nothing covers anything else."""

import numpy as np
import pytest
import torch
from helpers.boxes import overlaps, written
from helpers.tables import batch_of_blocks, blocks_of, no_blocks, simulated_blocks, small_blocks
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from torchcalib import plots
from torchcalib.plots import DARK, LIGHT, bin_comparison, tce_diagram

CASES = {
    "small": small_blocks,
    "one bin of 60": lambda: simulated_blocks([60]),
    "five bins of 60": lambda: simulated_blocks([12] * 5),
    "12 bins": lambda: simulated_blocks([500] * 12),
    "40 bins": lambda: simulated_blocks([25] * 40),
    "300 bins": lambda: simulated_blocks([2] * 300),
    "uneven bins of 50,000": lambda: simulated_blocks([20000, 9970, 10000, 6030, 8, 2, 3990], spread=6.0),
    "bins of one value": lambda: blocks_of([0.1] * 9 + [0.4] * 9 + [0.7] * 9, ([0] * 5 + [1] * 4) * 3, [9] * 3),
    "0 and 1": lambda: blocks_of([0.0] * 5 + [1.0] * 5, [0] * 5 + [1] * 5, [5, 5]),
    "one sample": lambda: blocks_of([0.0], [1], [1]),
    "1e-19 and so on": lambda: blocks_of(
        10.0 ** -torch.arange(20.0, dtype=torch.float64), torch.tensor([1, 1, *[0] * 18]), [5] * 4
    ),
    "no data": no_blocks,
}
SHOWING_ALL = ("small", "300 bins", "1e-19 and so on", "no data")
"""Steps have no labels that depend on what is in a bin: of them these few are drawn, the others in the extended run."""


def in_logits(table, **options):
    return tce_diagram(table, logit=True, **options)


def compared(table, **options):
    return bin_comparison({"PAVA": table, "equal width": table}, **options)


def compared_in_logits(table, **options):
    return compared(table, logit=True, **options)


DRAWINGS = [tce_diagram, in_logits, compared, compared_in_logits]


@pytest.mark.parametrize(
    ("draw", "cases"),
    [
        (tce_diagram, CASES),
        (in_logits, CASES),
        (compared, SHOWING_ALL),
        (compared_in_logits, SHOWING_ALL),
        pytest.param(compared, CASES, marks=pytest.mark.extended),
        pytest.param(compared_in_logits, CASES, marks=pytest.mark.extended),
    ],
)
def test_edge_cases_are_drawn_and_no_text_covers_another(draw, cases):
    covered = {}
    for case in cases:
        found = written(draw(CASES[case](), style=DARK, title="title"))
        covered[case] = overlaps(found)
        assert ("no data" in [text for text, _ in found]) == (case == "no data"), case
    assert not any(covered.values()), covered


def test_the_detector_of_overlaps_can_fail():
    ax = tce_diagram(small_blocks())
    ax.child_axes[2].text(0, 1.04, "covers", transform=ax.child_axes[2].transAxes)
    (pair,) = overlaps(written(ax))
    assert "covers" in pair
    assert "rejected: 6 of 12" in pair


def test_table_of_a_batch_is_indexed_written_and_read():
    tables = batch_of_blocks()
    torch.testing.assert_close(
        tables.tce, torch.tensor([100 * 6 / 12, 100 * float(tables.rejected[1, 0]) / 60]).double()
    )
    assert tables[1].quantiles.shape == (4, 33)
    assert tables.to_dict()["quantiles"].shape == (2, 4, 33)
    header, first, empty, *_ = str(small_blocks()).splitlines()
    assert header.split() == list(small_blocks().to_dict())[:-1]
    assert first.split()[-1] == "1"
    assert empty.split()[-1] == "0"
    assert str(tables).startswith("[0]\n")
    assert torch.isnan(no_blocks().tce)


def bars(panel):
    return [bar.get_height() for bar in panel.patches]


def test_sizes_rejected_parts_and_their_percentages():
    violins, _, sizes = tce_diagram(small_blocks()).child_axes
    assert bars(sizes) == [4, 0, 3, 5, 1, 0, 0, 5]
    assert [to_hex(bar.get_facecolor()) for bar in sizes.patches] == [LIGHT.bar] * 4 + [LIGHT.rejected] * 4
    assert [text.get_text() for text in sizes.texts] == ["■ rejected: 6 of 12, TCE 50%", "25%", "0%", "100%"]
    assert sizes.get_xlim() == violins.get_xlim() == (0, 4)
    assert [label.get_text() for label in sizes.get_xticklabels()] == ["0", "0.25", "0.4", "0.75", "1"]


@pytest.mark.parametrize(("n_bins", "rotation"), [(1, 0), (9, 0), (12, 90), (31, 90), (40, None)])
def test_percentages_stand_on_their_bars_upright_where_bins_are_narrow_and_left_out_where_they_are_too_narrow(
    n_bins, rotation
):
    ax = tce_diagram(simulated_blocks([20] * n_bins))
    sizes = ax.child_axes[2]
    labels = sizes.texts[1:]
    assert {label.get_rotation() for label in labels} == ({rotation} - {None})
    assert len(labels) == (0 if rotation is None else n_bins)
    written(ax)  # where things are is known once they are drawn
    for label, bar in zip(labels, sizes.patches, strict=False):
        box, top = label.get_window_extent(), bar.get_window_extent().y1
        assert top <= box.y0 < top + 5
        assert box.y1 < sizes.get_window_extent().y1 + 1


def test_only_none_is_0_percent_and_only_all_is_100():
    written = {0: "0%", 1e-4: "<1%", 0.01: "1%", 0.246: "25%", 0.99: "99%", 0.9999: ">99%", 1: "100%"}
    assert {share: plots.tce._percent(share) for share in written} == written


def polygons(panel):
    (violins,) = (c for c in panel.collections if isinstance(c, PolyCollection))
    return [path.vertices for path in violins.get_paths()]


@pytest.mark.parametrize("draw", [tce_diagram, in_logits])
def test_violins_reach_from_the_least_to_the_largest_prediction_of_their_bin(draw):
    table = small_blocks()
    shapes = polygons(draw(table).child_axes[0])
    held = [0, 2, 3]
    assert len(shapes) == len(held)
    for vertices, index in zip(shapes, held, strict=True):
        ends = vertices[:, 1].min(), vertices[:, 1].max()
        np.testing.assert_allclose(ends, table.quantiles[index, [0, -1]], rtol=1e-12)
        x = vertices[:, 0]
        np.testing.assert_allclose([x.min() + x.max(), x.max() - x.min()], [2 * index + 1, 0.84])


def test_a_violin_is_as_wide_as_predictions_are_dense():
    quantiles = np.linspace(-1, 1, 33) ** 3  # dense about 0, where their slope is 0
    at, width = plots.tce._violin(quantiles)
    assert (at[0], at[-1], width.max()) == (-1, 1, 1)
    np.testing.assert_allclose(width, width[::-1])
    assert (np.diff(width[: len(at) // 2 + 1]) > -1e-3).all()
    assert width[0] < 0.2


def marks(panel):
    return {
        line.get_marker(): line.get_xydata().tolist()
        for line in panel.lines
        if line.get_marker() in "Dv^" and len(line.get_xdata())
    }


def test_empirical_probability_is_marked_in_every_bin_that_holds_data():
    table = small_blocks()
    violins = tce_diagram(table).child_axes[0]
    assert marks(violins) == {"D": [[0.5, 0.25], [2.5, table.frequency[2].item()], [3.5, 0.8]]}


def test_what_is_beyond_a_logit_axis_is_a_triangle_at_its_end():
    violins = in_logits(CASES["0 and 1"]()).child_axes[0]
    low, high = violins.get_ylim()
    assert violins.get_yscale() == "logit"
    assert 0 < low < 0.1 / 10 < 1 - 0.1 / 10 < high < 1
    assert marks(violins) == {"v": [[0.5, low]], "^": [[1.5, high]]}


@pytest.mark.parametrize("draw", [tce_diagram, in_logits])
def test_histogram_is_on_the_axis_of_the_violins_and_counts_every_sample_once(draw):
    table = simulated_blocks([500] * 12)
    violins, histogram, _ = draw(table).child_axes
    assert histogram.get_ylim() == violins.get_ylim()
    assert histogram.get_yscale() == violins.get_yscale()
    assert sum(bar.get_width() for bar in histogram.patches) == pytest.approx(6000)
    middle = table.upper[5]  # below it lies half of the samples
    assert sum(bar.get_width() for bar in histogram.patches if bar.get_y() + bar.get_height() <= middle) <= 3000
    assert sum(bar.get_width() for bar in histogram.patches if bar.get_y() <= middle) >= 3000


def test_recorded_blocks_of_imagenet_dogs(recorded, expected):
    name = "imagenet_dogs_alexnet.npz"
    (blocks,) = (e["value"] for e in expected if e["file"] == name and e["case"] == "bins")
    (tce,) = (e["value"] for e in expected if e["file"] == name and e["case"] == "tce")
    data = recorded(name)
    table = blocks_of(data["probs"], data["targets"], blocks["sizes"], blocks["edges"], blocks["rejected"])
    torch.testing.assert_close((table.frequency * table.n).round().long().tolist(), blocks["positives"])
    assert table.tce.item() == pytest.approx(tce, abs=1e-9)
    for draw in DRAWINGS:
        ax = draw(table)
        assert overlaps(written(ax)) == []
    sizes = tce_diagram(table).child_axes[2]
    assert [text.get_text() for text in sizes.texts] == [
        "■ rejected: 21,368 of 50,000, TCE 42.74%",
        *("0%", "0%", "25%", "100%", "100%", "100%", "89%", "95%", "81%"),
    ]


@pytest.mark.parametrize("style", [LIGHT, DARK])
def test_colours_of_a_style_are_used(style):
    ax = tce_diagram(small_blocks(), style=style)
    violins, _, sizes = ax.child_axes
    assert to_hex(sizes.texts[0].get_color()) == style.rejected
    assert {to_hex(line.get_color()) for line in violins.lines} == {style.outcome}
    assert {to_hex(panel.get_facecolor()) for panel in ax.child_axes} == {style.paper}
