"""Pictures of tested bins and of several binnings: they hold the tables' numbers, and nothing covers anything else."""

from itertools import combinations, pairwise

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from torchcalib import BinTable, TCETable, bin_table, binomial_test, plots
from torchcalib.plots import DARK, LIGHT, bin_comparison, to_png, to_svg
from torchcalib.plots.probability_axis import ProbabilityAxis, short


def table_of(probs, outcomes, sizes, edges=None, rejected=None) -> TCETable:
    """The table of blocks of the sorted sample, by loops over them; a size of 0 is an empty bin."""
    probs, order = torch.as_tensor(probs, dtype=torch.float64).sort(stable=True)
    outcomes = torch.as_tensor(outcomes)[order]
    held = [(p, y) for p, y in zip(probs.split(sizes), outcomes.split(sizes), strict=True)]
    if edges is None:
        edges = [0, *((a[-1] + b[0]) / 2 for (a, _), (b, _) in pairwise(held)), 1]
    edges = torch.tensor(edges, dtype=torch.float64)
    n = torch.tensor(sizes, dtype=torch.float64)
    confidence = torch.stack([p.mean() for p, _ in held])
    frequency = torch.stack([y.double().mean() for _, y in held])
    if rejected is None:
        rejected = [(binomial_test(y.sum(), len(y), p) <= 0.05).sum() if len(y) else 0 for p, y in held]
    nan = torch.full((33,), torch.nan, dtype=torch.float64)
    ranks = torch.linspace(0, 1, 33, dtype=torch.float64)
    quantiles = [p[(ranks * (len(p) - 1)).round().long()] if len(p) else nan for p, _ in held]
    return TCETable(
        lower=edges[:-1],
        upper=edges[1:],
        n=n,
        share=n / n.sum(),
        confidence=confidence,
        frequency=frequency,
        gap=(frequency - confidence).nan_to_num(),
        ecd=torch.full_like(n, torch.nan),
        band_low=torch.full_like(n, torch.nan),
        band_high=torch.full_like(n, torch.nan),
        rejected=torch.tensor(rejected, dtype=torch.float64),
        quantiles=torch.stack(quantiles),
    )


def simulated(sizes, seed=0, spread=2.0) -> TCETable:
    """An over-confident model: outcomes follow the logit divided by 1.6."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    outcomes = torch.rand(logits.shape, generator=generator, dtype=torch.float64) < (logits / 1.6).sigmoid()
    return table_of(logits.sigmoid(), outcomes.long(), sizes)


def small() -> TCETable:
    """Blocks of 4, 0, 3 and 5 samples; the last one is of a single value."""
    probs = [0.05, 0.1, 0.15, 0.2, 0.5, 0.55, 0.6, *[0.9] * 5]
    return table_of(probs, [0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 0, 1], [4, 0, 3, 5], [0, 0.25, 0.4, 0.75, 1], [1, 0, 0, 5])


def no_data() -> TCETable:
    return table_of([], torch.zeros(0, dtype=torch.int64), [0], [0, 1])


CASES = {
    "small": small,
    "one bin of 60": lambda: simulated([60]),
    "five bins of 60": lambda: simulated([12] * 5),
    "12 bins": lambda: simulated([500] * 12),
    "40 bins": lambda: simulated([25] * 40),
    "300 bins": lambda: simulated([2] * 300),
    "uneven bins of 50,000": lambda: simulated([20000, 9970, 10000, 6030, 8, 2, 3990], spread=6.0),
    "bins of one value": lambda: table_of([0.1] * 9 + [0.4] * 9 + [0.7] * 9, ([0] * 5 + [1] * 4) * 3, [9] * 3),
    "0 and 1": lambda: table_of([0.0] * 5 + [1.0] * 5, [0] * 5 + [1] * 5, [5, 5]),
    "one sample": lambda: table_of([0.0], [1], [1]),
    "1e-19 and so on": lambda: table_of(
        10.0 ** -torch.arange(20.0, dtype=torch.float64), torch.tensor([1, 1, *[0] * 18]), [5] * 4
    ),
    "no data": no_data,
}


def in_logits(table, ax=None, **options):
    return plots.tce_diagram(table, ax, logit=True, **options)


def compared(table, ax=None, **options):
    return bin_comparison({"PAVA": table, "equal width": table}, ax, **options)


def compared_logit(table, ax=None, **options):
    return compared(table, ax, logit=True, **options)


DRAWINGS = [plots.tce_diagram, in_logits, compared, compared_logit]


def written(ax):
    """All text that is drawn, with the box it takes, in pixels."""
    renderer = FigureCanvasAgg(ax.figure).get_renderer()
    ax.figure.draw(renderer)
    found = []
    for axes in (ax, *ax.child_axes):
        texts = [*axes.texts, axes._left_title]
        if axes.axison:
            for axis in (axes.xaxis, axes.yaxis):
                texts += [axis.label, *(label for label in axis.get_ticklabels() if label.get_visible())]
        if axes.get_legend():
            texts += axes.get_legend().get_texts()
        found += [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text().strip()]
    return found


def overlaps(found) -> list[str]:
    """Pairs of texts whose boxes share more than a fraction of a pixel."""
    return [
        f"{one!r} and {other!r}"
        for (one, a), (other, b) in combinations(found, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("draw", DRAWINGS)
def test_edge_cases_are_drawn_and_no_text_covers_another(draw, case):
    ax = draw(CASES[case](), style=DARK, title="title")
    found = written(ax)
    assert overlaps(found) == []
    assert ("no data" in [text for text, _ in found]) == (case == "no data")


def test_the_detector_of_overlaps_can_fail():
    ax = plots.tce_diagram(small())
    ax.child_axes[2].text(0, 1.04, "covers", transform=ax.child_axes[2].transAxes)
    (pair,) = overlaps(written(ax))
    assert "covers" in pair
    assert "rejected: 6 of 12" in pair


@pytest.mark.parametrize("draw", DRAWINGS)
def test_only_the_given_axes_are_drawn_on(draw):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before, open_figures = matplotlib.rcParams.copy(), pyplot.get_fignums()
    figure = Figure(facecolor="#123456")
    ax, other = figure.subplots(1, 2)
    children, limits = len(other.get_children()), other.axis()
    assert draw(small(), ax) is ax
    assert figure.axes == [ax, other]
    assert to_hex(figure.get_facecolor()) == "#123456"
    assert (len(other.get_children()), other.axis()) == (children, limits)
    frame = ax.get_position()
    figure.draw(FigureCanvasAgg(figure).get_renderer())
    for panel in ax.child_axes:
        box = panel.get_position()
        assert frame.x0 <= box.x0 + 1e-9 < box.x1 <= frame.x1 + 1e-9
        assert frame.y0 <= box.y0 + 1e-9 < box.y1 <= frame.y1 + 1e-9
    assert matplotlib.rcParams.copy() == before
    assert pyplot.get_fignums() == open_figures


@pytest.mark.parametrize("draw", DRAWINGS)
def test_same_picture_gives_the_same_bytes(draw):
    first, second = (draw(simulated([30] * 4)) for _ in range(2))
    svg = to_svg(first)
    assert to_png(first, dpi=50) == to_png(second, dpi=50)
    assert svg == to_svg(second)


def batch() -> TCETable:
    """Two series, the second of one bin, filled up with bins of no samples."""
    one, other = small(), simulated([60])
    padding = [1.0, 1.0, 0.0, 0.0, torch.nan, torch.nan, 0.0, *[torch.nan] * 3, 0.0, torch.nan]
    columns = []
    for name, fill in zip(one.to_dict(), padding, strict=True):
        full, short_one = getattr(one, name), getattr(other, name)
        columns.append(torch.stack([full, torch.cat([short_one, torch.full_like(full[1:], fill)])]))
    return TCETable(*columns)


@pytest.mark.parametrize("draw", DRAWINGS)
def test_batch_of_tables_is_refused_and_one_of_them_drawn_without_what_fills_it_up(draw):
    with pytest.raises(ValueError, match=r"must hold one series of bins, got a batch of shape \(2, 4\)\. Draw one of"):
        draw(batch())
    assert to_svg(draw(batch()[1])) == to_svg(draw(simulated([60])))
    assert to_svg(draw(batch()[0])) == to_svg(draw(small()))


def test_table_of_a_batch_is_indexed_written_and_read():
    tables = batch()
    torch.testing.assert_close(
        tables.tce, torch.tensor([100 * 6 / 12, 100 * float(tables.rejected[1, 0]) / 60]).double()
    )
    assert tables[1].quantiles.shape == (4, 33)
    assert tables.to_dict()["quantiles"].shape == (2, 4, 33)
    header, first, empty, *_ = str(small()).splitlines()
    assert header.split() == list(small().to_dict())[:-1]
    assert first.split()[-1] == "1"
    assert empty.split()[-1] == "0"
    assert str(tables).startswith("[0]\n")
    assert torch.isnan(no_data().tce)


def bars(panel):
    return [bar.get_height() for bar in panel.patches]


def test_sizes_rejected_parts_and_their_percentages():
    violins, _, sizes = plots.tce_diagram(small()).child_axes
    assert bars(sizes) == [4, 0, 3, 5, 1, 0, 0, 5]
    assert [to_hex(bar.get_facecolor()) for bar in sizes.patches] == [LIGHT.bar] * 4 + [LIGHT.rejected] * 4
    assert [text.get_text() for text in sizes.texts] == ["■ rejected: 6 of 12, TCE 50%", "25%", "0%", "100%"]
    assert sizes.get_xlim() == violins.get_xlim() == (0, 4)
    assert [label.get_text() for label in sizes.get_xticklabels()] == ["0", "0.25", "0.4", "0.75", "1"]


@pytest.mark.parametrize(("n_bins", "rotation"), [(1, 0), (9, 0), (12, 90), (31, 90), (40, None)])
def test_percentages_stand_on_their_bars_upright_where_bins_are_narrow_and_left_out_where_they_are_too_narrow(
    n_bins, rotation
):
    ax = plots.tce_diagram(simulated([20] * n_bins))
    sizes = ax.child_axes[2]
    labels = sizes.texts[1:]
    assert {label.get_rotation() for label in labels} == ({rotation} - {None})
    assert len(labels) == (0 if rotation is None else n_bins)
    written(ax)  # where things are is known once they are drawn
    for label, bar in zip(labels, sizes.patches, strict=False):
        box, top = label.get_window_extent(), bar.get_window_extent().y1
        assert top <= box.y0 < top + 5
        assert box.y1 < sizes.get_window_extent().y1 + 1


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0, "0%"), (1e-4, "<1%"), (0.01, "1%"), (0.246, "25%"), (0.99, "99%"), (0.9999, ">99%"), (1, "100%")],
)
def test_only_none_is_0_percent_and_only_all_is_100(share, expected):
    assert plots.tce._percent(share) == expected


def polygons(panel):
    (violins,) = (c for c in panel.collections if isinstance(c, PolyCollection))
    return [path.vertices for path in violins.get_paths()]


@pytest.mark.parametrize("draw", [plots.tce_diagram, in_logits])
def test_violins_reach_from_the_least_to_the_largest_prediction_of_their_bin(draw):
    table = small()
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
    table = small()
    violins = plots.tce_diagram(table).child_axes[0]
    assert marks(violins) == {"D": [[0.5, 0.25], [2.5, table.frequency[2].item()], [3.5, 0.8]]}


def test_what_is_beyond_a_logit_axis_is_a_triangle_at_its_end():
    violins = in_logits(CASES["0 and 1"]()).child_axes[0]
    low, high = violins.get_ylim()
    assert violins.get_yscale() == "logit"
    assert 0 < low < 0.1 / 10 < 1 - 0.1 / 10 < high < 1
    assert marks(violins) == {"v": [[0.5, low]], "^": [[1.5, high]]}


@pytest.mark.parametrize("draw", [plots.tce_diagram, in_logits])
def test_histogram_is_on_the_axis_of_the_violins_and_counts_every_sample_once(draw):
    table = simulated([500] * 12)
    violins, histogram, _ = draw(table).child_axes
    assert histogram.get_ylim() == violins.get_ylim()
    assert histogram.get_yscale() == violins.get_yscale()
    assert sum(bar.get_width() for bar in histogram.patches) == pytest.approx(6000)
    middle = table.upper[5]  # below it lies half of the samples
    assert sum(bar.get_width() for bar in histogram.patches if bar.get_y() + bar.get_height() <= middle) <= 3000
    assert sum(bar.get_width() for bar in histogram.patches if bar.get_y() <= middle) >= 3000


def test_steps_run_from_edge_to_edge_at_the_frequency_and_leave_gaps_where_bins_are_empty():
    table = small()
    first, second = bin_comparison({"a": table, "b": bin_table(torch.rand(9), torch.ones(9), task="binary")}).child_axes
    (diagonal, steps), (rug,) = first.lines, first.collections
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    np.testing.assert_array_equal(steps.get_xdata(), [0, 0.25, 0.25, 0.4, 0.4, 0.75, 0.75, 1])
    np.testing.assert_array_equal(steps.get_ydata(), table.frequency.repeat_interleave(2))
    assert [segment[0, 0] for segment in rug.get_segments()] == [0, 0.25, 0.4, 0.75, 1]
    assert first.get_title(loc="left") == "a: 3 bins of 3 to 5 samples, 1 empty"
    assert first.get_position().y0 > second.get_position().y1


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (small, "3 bins of 3 to 5 samples, 1 empty"),
        (lambda: simulated([60]), "1 bin of 60 samples"),
        (lambda: simulated([1] * 3), "3 bins of 1 sample"),
        (lambda: simulated([1200, 3400]), "2 bins of 1,200 to 3,400 samples"),
    ],
)
def test_headings_count_bins_and_samples_and_names_are_taken_as_they_are(table, expected):
    (panel,) = bin_comparison({"$n_{min}$": table()}).child_axes
    assert panel.get_title(loc="left") == f"$n_{{min}}$: {expected}"
    assert not panel._left_title.get_parse_math()


def test_comparing_nothing_or_a_batch_is_refused_by_name():
    with pytest.raises(ValueError, match=r"`tables` must hold at least one table, got none\."):
        bin_comparison({})
    with pytest.raises(ValueError, match=r"`tables\['b'\]` must hold one series of bins"):
        bin_comparison({"a": small(), "b": batch()})


def test_plain_bin_tables_are_compared_too():
    table = small()
    plain = BinTable(*(getattr(table, name) for name in BinTable.__dataclass_fields__))
    assert to_svg(bin_comparison({"x": plain})) == to_svg(bin_comparison({"x": table}))


@pytest.mark.parametrize(
    ("probability", "expected"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.25, "0.25"),
        (0.5, "0.5"),
        (0.0046, "0.0046"),
        (0.99039, "0.9904"),
        (2.437e-6, "2.4e−6"),
        (1e-19, "1e−19"),
        (1 - 1.3e-4, "1−1.3e−4"),
    ],
)
def test_edges_are_written_by_their_distance_from_0_or_1(probability, expected):
    assert short(probability) == expected


@pytest.mark.parametrize("n", [0.5, 1, 60, 50_000, 3e9])
def test_a_logit_axis_ends_where_samples_cannot_tell_probabilities_from_0_and_1(n):
    axis = ProbabilityAxis.logit_of(np.array([0.0, 1e-19, 0.3, 1.0]), n)
    finest = min(0.1 / n, 0.01)
    assert finest / 2 < axis.low < finest
    assert finest / 2 < 1 - axis.high < finest
    inside = np.array([0.02, 0.5, 0.98])
    np.testing.assert_allclose(axis.value(axis.place(inside)), inside, rtol=1e-12)
    np.testing.assert_array_equal(axis.place(np.array([0.0, 1.0])), axis.place(np.array([axis.low, axis.high])))


def test_a_logit_axis_is_no_longer_than_what_it_shows():
    axis = ProbabilityAxis.logit_of(np.array([0.2, 0.4]), 1e6)
    np.testing.assert_allclose(axis.place(np.array([0.2, 0.4])) - axis.place(np.array(axis[:2])), [0.4, -0.4])


def test_recorded_blocks_of_imagenet_dogs(recorded, expected):
    name = "imagenet_dogs_alexnet.npz"
    (blocks,) = (e["value"] for e in expected if e["file"] == name and e["case"] == "bins")
    (tce,) = (e["value"] for e in expected if e["file"] == name and e["case"] == "tce")
    data = recorded(name)
    table = table_of(data["probs"], data["targets"], blocks["sizes"], blocks["edges"], blocks["rejected"])
    torch.testing.assert_close((table.frequency * table.n).round().long().tolist(), blocks["positives"])
    assert table.tce.item() == pytest.approx(tce, abs=1e-9)
    for draw in DRAWINGS:
        ax = draw(table)
        assert overlaps(written(ax)) == []
    sizes = plots.tce_diagram(table).child_axes[2]
    assert [text.get_text() for text in sizes.texts] == [
        "■ rejected: 21,368 of 50,000, TCE 42.74%",
        *("0%", "0%", "25%", "100%", "100%", "100%", "89%", "95%", "81%"),
    ]


@pytest.mark.parametrize("style", [LIGHT, DARK])
def test_colours_of_a_style_are_used(style):
    ax = plots.tce_diagram(small(), style=style)
    violins, _, sizes = ax.child_axes
    assert to_hex(sizes.texts[0].get_color()) == style.rejected
    assert {to_hex(line.get_color()) for line in violins.lines} == {style.outcome}
    assert {to_hex(panel.get_facecolor()) for panel in ax.child_axes} == {style.paper}
