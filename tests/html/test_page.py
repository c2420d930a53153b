"""What pages have in common: numbers in words, and the dark picture that is made of the light one."""

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.reports import quick
from helpers.tables import TESTED

from torchcalib import compare, plots
from torchcalib.files import write_whole
from torchcalib.html import page as pages
from torchcalib.monitoring import History, HistoryRow
from torchcalib.plots import DARK, LIGHT


def systems_called_like_a_colour():
    probs = torch.rand(2, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.arange(40) % 2
    return compare({LIGHT.ink: probs[0], "b": probs[1]}, target, task="binary", n_replicates=39)


@pytest.mark.parametrize(
    ("draw", "of"),
    [
        (plots.reliability_diagram, lambda: quick("binary").main_table),
        (plots.confidence_histogram, lambda: quick("binary").main_table),
        (plots.tce_diagram, lambda: TESTED),
        (partial(plots.tce_diagram, logit=True), lambda: quick("binary").tests["positive_class"]),
        (plots.training_curve, lambda: History((HistoryRow(1, 1, {"nll": 1.0}), HistoryRow(2, 2, {"nll": 2.0}, "so")))),
        (plots.difference_plot, systems_called_like_a_colour),
    ],
)
def test_the_dark_picture_is_what_drawing_in_dark_colours_gives(draw, of):
    def numbered(svg):
        """Ids in the order in which they come: some are made of what they name, its colours too."""
        ids = {}
        return re.sub(r"\b[a-z]?[0-9a-f]{10}\b", lambda found: ids.setdefault(found[0], f"id{len(ids)}"), svg)

    drawn = pages.both_themes(draw, of(), "p", "label")
    dark = pages._inline(plots.to_svg(draw(of(), style=DARK)), "p-dark-", "label", "dark")
    assert numbered(drawn[drawn.index('<svg class="dark"') :]) == numbered(dark)


def test_gains_have_one_decimal():
    written = {8.4163: "8.4%", -0.02: "0.0%", -4.44: "−4.4%", math.nan: "undefined", -math.inf: "−infinite"}
    assert {rcl: pages.gain(rcl) for rcl in written} == written


def test_numbers_have_four_significant_digits():
    written = {
        0.0: "0",
        1.0: "1",
        -1.0: "−1",
        0.5: "0.5000",
        -0.0109003639: "−0.01090",
        1.2252551: "1.225",
        4.605170186: "4.605",
        999.96: "1000",
        12345.678: "12,346",
        -3e-10: "≈ 0",
        0.00001234: "1.234e-05",
        math.inf: "infinite",
        -math.inf: "−infinite",
        math.nan: "undefined",
    }
    assert {value: pages.number(value) for value in written} == written
    assert pages.number(-0.0) == "0"


def test_columns_have_four_decimals_and_a_sign():
    written = {0.25: "+0.2500", -0.25: "−0.2500", -3e-10: "0.0000", math.inf: "+infinite", math.nan: "undefined"}
    assert {value: pages.four_decimals(value, signed=True) for value in written} == written


def test_counts_have_decimals_only_where_weights_are_fractions():
    written = {50000.0: "50,000", 3: "3", 0.0: "0", 12.5: "12.50"}
    assert {n: pages.count(n) for n in written} == written


def test_failed_write_leaves_the_old_file_and_no_part(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"old")

    def fail(self, target):
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no"):
        write_whole(tmp_path / "x", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"old")]
