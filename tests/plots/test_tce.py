"""Diagrams of tested bins draw the numbers of their tables, and no text overlaps another."""

import numpy as np
import pytest
import torch
from helpers.drawings import drawn_texts, overlaps
from helpers.tables import (
    batch_of_blocks,
    blocks_of,
    in_logits,
    no_blocks,
    simulated_blocks,
    small_blocks,
    two_binnings,
)
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from torchcalib.functional import BinTable
from torchcalib.plots import DARK, bin_comparison, tce_diagram
from torchcalib.plots.canvas import LIGHT, Canvas, ProbabilityAxis

CASES = {
    "small": small_blocks,
    "no data": no_blocks,
    "300 bins": lambda: simulated_blocks([2] * 300),
    "1e-19 and so on": lambda: blocks_of(
        10.0 ** -torch.arange(20.0, dtype=torch.float64), torch.tensor([1, 1, *[0] * 18]), [5] * 4
    ),
    "one bin of 60": lambda: simulated_blocks([60]),
    "12 bins": lambda: simulated_blocks([500] * 12),
    "uneven bins of 50,000": lambda: simulated_blocks([20000, 9970, 10000, 6030, 8, 2, 3990], spread=6.0),
    "bins of one value": lambda: blocks_of([0.1] * 9 + [0.4] * 9 + [0.7] * 9, ([0] * 5 + [1] * 4) * 3, [9] * 3),
    "0 and 1": lambda: blocks_of([0.0] * 5 + [1.0] * 5, [0] * 5 + [1] * 5, [5, 5]),
    "one sample": lambda: blocks_of([0.0], [1], [1]),
}


IN_LOGITS = [
    "no data",
    "1e-19 and so on",
    "uneven bins of 50,000",
    "0 and 1",
    "one sample",
]  # cases that differ in the limits of the axis


@pytest.mark.parametrize(
    ("draw", "cases"), [(tce_diagram, CASES), (in_logits, IN_LOGITS), (two_binnings, list(CASES)[:4])]
)
def test_edge_cases_are_drawn_without_overlapping_texts(draw, cases):
    covered = {}
    for case in cases:
        found = drawn_texts(draw(CASES[case](), style=DARK, title="title"))
        covered[case] = overlaps(found)
        assert ("no data" in [text for text, _ in found]) == (case == "no data"), case
    assert not any(covered.values()), covered


def test_batches_of_tables_support_indexing_text_and_conversion():
    tables = batch_of_blocks()
    tce = torch.tensor([100 * 6 / 12, 100 * float(tables.rejected[1, 0]) / 60])
    torch.testing.assert_close(tables.tce, tce.double())
    assert tables[1].quantiles.shape == (4, 33)
    assert tables.to_dict()["quantiles"].shape == (2, 4, 33)
    assert [line for line in str(tables).splitlines() if line.startswith("[")] == ["[0]", "[1]"]
    assert torch.isnan(no_blocks().tce)


@pytest.mark.parametrize("draw", [tce_diagram, in_logits])
def test_panels_draw_extremes_frequencies_sizes_and_rejections(draw):
    table = small_blocks()
    violins, histogram, sizes = draw(table).child_axes
    (shapes,) = (c for c in violins.collections if isinstance(c, PolyCollection))
    for path, index in zip(shapes.get_paths(), [0, 2, 3], strict=True):
        x, y = path.vertices.T
        np.testing.assert_allclose([y.min(), y.max()], table.quantiles[index, [0, -1]], rtol=1e-12)
        np.testing.assert_allclose([x.min() + x.max(), x.max() - x.min()], [2 * index + 1, 0.84])
    assert marks(violins) == {"D": [[0.5, 0.25], [2.5, table.frequency[2].item()], [3.5, 0.8]]}
    assert [bar.get_height() for bar in sizes.patches] == [4, 0, 3, 5, 1, 0, 0, 5]
    assert [text.get_text() for text in sizes.texts] == ["■ rejected: 6 of 12, TCE 50%", "25%", "0%", "100%"]
    assert (histogram.get_ylim(), histogram.get_yscale()) == (violins.get_ylim(), violins.get_yscale())
    (bars,) = draw(CASES["12 bins"]()).child_axes[1].patches
    assert bars.get_data().values.sum() == pytest.approx(6000)


def marks(panel):
    lines = [line for line in panel.lines if line.get_marker() in "Dv^" and len(line.get_xdata())]
    return {line.get_marker(): line.get_xydata().tolist() for line in lines}


def test_values_beyond_a_logit_axis_are_triangles_at_its_end():
    violins = in_logits(CASES["0 and 1"]()).child_axes[0]
    low, high = violins.get_ylim()
    assert 0 < low < 0.1 / 10 < 1 - 0.1 / 10 < high < 1
    assert marks(violins) == {"v": [[0.5, low]], "^": [[1.5, high]]}


@pytest.mark.parametrize("n", [0.5, 60, 3e9])
def test_limits_of_a_logit_axis_depend_on_the_values_and_the_sample_size(n):
    axis = ProbabilityAxis.logit_of(np.array([0.0, 1e-19, 0.3, 1.0]), n)
    finest = min(0.1 / n, 0.01)
    assert finest / 2 < axis.low < finest
    assert finest / 2 < 1 - axis.high < finest
    axis = ProbabilityAxis.logit_of(np.array([0.2, 0.4]), 1e6)
    place = axis.apply(Canvas(Figure().subplots(), LIGHT), "y").transform
    margins = place(np.array([0.2, 0.4])) - place(np.array(axis[:2]))
    np.testing.assert_allclose(margins * np.log(10), [0.4, -0.4])


def test_diagram_of_imagenet_dogs_shows_the_recorded_blocks(recorded, expected):
    name = "imagenet_dogs_alexnet.npz"
    values = {e["case"]: e["value"] for e in expected if e["file"] == name and e["case"] in ("bins", "tce")}
    blocks, data = values["bins"], recorded(name)
    table = blocks_of(data["probs"], data["targets"], blocks["sizes"], blocks["edges"], blocks["rejected"])
    torch.testing.assert_close((table.frequency * table.n).round().long().tolist(), blocks["positives"])
    assert table.tce.item() == pytest.approx(values["tce"], abs=1e-9)
    assert [text.get_text() for text in tce_diagram(table).child_axes[2].texts] == [
        "■ rejected: 21,368 of 50,000, TCE 42.74%",
        *("0%", "0%", "25%", "100%", "100%", "100%", "89%", "95%", "81%"),
    ]


def test_bin_comparison_draws_frequencies_as_steps_and_counts_in_titles():
    table = small_blocks()
    plain = BinTable(*(getattr(table, name) for name in BinTable.__dataclass_fields__))
    first, second, third = bin_comparison({"a": table, "$b": simulated_blocks([60]), "c": plain}).child_axes
    for panel in (first, third):
        (diagonal, steps), (rug,) = panel.lines, panel.collections
        assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
        np.testing.assert_array_equal(steps.get_xdata(), [0, 0.25, 0.25, 0.4, 0.4, 0.75, 0.75, 1])
        np.testing.assert_array_equal(steps.get_ydata(), table.frequency.repeat_interleave(2))
        assert [segment[0, 0] for segment in rug.get_segments()] == [0, 0.25, 0.4, 0.75, 1]
    assert first.get_title(loc="left") == "a: 3 bins of 3 to 5 samples, 1 empty"
    assert second.get_title(loc="left") == "$b: 1 bin of 60 samples"
    assert not second._left_title.get_parse_math()
    assert first.get_position().y0 > second.get_position().y1
    with pytest.raises(ValueError, match=r"`tables\['b'\]` must have no batch axes"):
        bin_comparison({"a": small_blocks(), "b": batch_of_blocks()})
