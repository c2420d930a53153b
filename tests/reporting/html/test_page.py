"""Formats of numbers in tables, and the dark version of figures."""

import math
import re
from functools import partial

import pytest
from helpers.reports import quick_report
from helpers.systems import compared
from helpers.tables import small_blocks

from torchcalib import plots
from torchcalib.display import words
from torchcalib.plots import DARK
from torchcalib.reporting.render import html as pages
from torchcalib.results.history import History, HistoryRow

HISTORY = History((HistoryRow(1, 1, {"nll": 1.0}), HistoryRow(2, 2, {"nll": 2.0}, "so")))


@pytest.mark.parametrize(
    ("draw", "of"),
    [
        (plots.reliability_diagram, lambda: quick_report("binary").main_table),
        (plots.confidence_histogram, lambda: quick_report("binary").main_table),
        (plots.tce_diagram, small_blocks),
        (partial(plots.tce_diagram, logit=True), lambda: quick_report("binary").tests["positive"]),
        (plots.training_curve, lambda: HISTORY),
        (plots.difference_plot, lambda: compared("binary")),
    ],
)
def test_dark_figure_equals_a_figure_drawn_with_the_dark_style(draw, of):
    def numbered(svg):
        """Replace ids by consecutive numbers, because they are hashes that include the colours."""
        ids = {}
        return re.sub(r"\b[a-z]?[0-9a-f]{10}\b", lambda found: ids.setdefault(found[0], f"id{len(ids)}"), svg)

    drawn = pages.both_themes(draw, of(), "p", "label")
    dark = pages._inline(plots.to_svg(draw(of(), style=DARK)), "p-dark-", "label", "dark")
    assert numbered(drawn[drawn.index('<svg class="dark"') :]) == numbered(dark)


@pytest.mark.parametrize(
    ("write", "written"),
    [
        (words.gain, {8.4163: "8.4%", -0.02: "0.0%", -4.44: "−4.4%", math.nan: "undefined", -math.inf: "−infinite"}),
        (words.significant, {0.0: "0", -1.0: "−1", 0.5: "0.500", -0.0109003639: "−0.0109", 999.96: "1,000"}),
        (words.significant, {12345.678: "12,346", -3e-10: "≈ 0", 0.00001234: "1.23e-05", math.inf: "infinite"}),
        (
            words.percent,
            {0.0: "0%", 0.12345: "12.3%", 0.81: "81.0%", 1.0: "100%", 0.99999: "100%", math.nan: "undefined"},
        ),
        (partial(words.decimals, plus="+"), {0.25: "+0.2500", -0.25: "−0.2500", -3e-10: "0.0000"}),
        (words.count, {50000.0: "50,000", 3: "3", 0.0: "0", 12.5: "12.50"}),
    ],
)
def test_numbers_are_written_with_their_significant_digits(write, written):
    assert {value: write(value) for value in written} == written
