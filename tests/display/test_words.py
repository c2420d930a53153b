"""Formats of numbers and of bin edges."""

import math
from functools import partial

import pytest
import torch
from helpers.tables import blocks_of

from torchcalib.display import words
from torchcalib.display.words import edges_in_words, percent
from torchcalib.functional import calibration_curve


@pytest.mark.parametrize(
    ("edges", "places", "texts"),
    [
        ([0, 1 / 15, 2 / 15, 1], 4, ["0", "0.0667", "0.1333", "1"]),
        ([0, 0.99993, 0.999987, 1], 4, ["0", "0.99993", "0.999987", "1"]),
        ([1e-9, 2.34e-5, 0.5, 1 - 1e-9], 4, ["1.0e−9", "2.3e−5", "0.5", "0.999999999"]),
        ([0.12341, 0.12342], 4, ["0.12341", "0.12342"]),
        ([0.12, 0.121, 0.25], 2, ["0.12", "0.121", "0.25"]),
        ([0.3, 0.3, float("nan")], 4, ["0.3", "0.3", "nan"]),
    ],
)
def test_edges_have_enough_digits_to_differ(edges, places, texts):
    written = edges_in_words(edges, places)
    assert [written[edge] for edge in edges] == texts


def test_no_bin_of_a_table_has_equal_edges_in_words():
    """Predictions of a saturated model: with four decimals, the last three bins would be "1 to 1"."""
    probs = torch.tensor([0.2, 0.99991, 0.999951, 0.9999832, 0.99999901], dtype=torch.float64)
    table = blocks_of(probs, [0, 1, 1, 0, 1], [1] * 5)
    shown = [row.cells[0].page for section in table.layout().sections for row in section.rows]
    assert len(set(shown)) == 5
    assert all(low != high for low, high in (text.split(" to ") for text in shown))
    binned = calibration_curve(probs, torch.ones(5, dtype=torch.int64), task="binary", n_bins=3).layout()
    assert [row.cells[0].page for row in binned.sections[0].rows] == ["0 to 0.3333", "0.3333 to 0.6667", "0.6667 to 1"]


def test_percentages_do_not_depend_on_rounding_errors_of_sums():
    assert percent(0.7725) == percent(0.7725000000000001) == percent(0.7724999999999999)


@pytest.mark.parametrize(
    ("write", "written"),
    [
        (words.gain, {8.4163: "8.4%", -0.02: "0.0%", -4.44: "−4.4%", math.nan: "undefined", -math.inf: "−infinite"}),
        (words.significant, {0.0: "0", -1.0: "−1", 0.5: "0.500", -0.0109003639: "−0.0109", 999.96: "1,000"}),
        (words.significant, {12345.678: "12,346", -3e-10: "≈ 0", 0.00001234: "1.23e-05", math.inf: "infinite"}),
        (percent, {0.0: "0%", 0.12345: "12.3%", 0.81: "81.0%", 1.0: "100%", 0.99999: "100%", math.nan: "undefined"}),
        (partial(words.decimals, plus="+"), {0.25: "+0.2500", -0.25: "−0.2500", -3e-10: "0.0000"}),
        (words.count, {50000.0: "50,000", 3: "3", 0.0: "0", 12.5: "12.50", 119.99999999999999: "120"}),
        # relative to the distance from 0 or 1; exactly 0% and 100% only for none and all
        (words.short_probability, {1: "1", 0.25: "0.25", 0.99039: "0.9904", 2.437e-6: "2.4e−6", 1e-19: "1e−19"}),
        (words.short_probability, {1 - 1.3e-4: "0.99987", 1 - 1e-12: "0.999999999999"}),
        (partial(words.rounded, form="+.2g"), {-0.123: "−0.12", 0.123: "+0.12", 2e-5: "+2e−05"}),
        (words.short_percent, {0: "0%", 1e-4: "<1%", 0.01: "1%", 0.246: "25%", 0.99: "99%", 0.9999: ">99%", 1: "100%"}),
        (words.short_count, {876: "876", 4500: "4.5k", 42_000: "42k", 5.1e6: "5.1M", 3.1e9: "3.1G", 0.25: "0.25"}),
    ],
)
def test_numbers_are_written_with_their_significant_digits(write, written):
    assert {value: write(value) for value in written} == written


def test_ends_of_intervals_have_minus_signs():
    assert words.ends(-0.0109, 0.00041) == "−0.0109 to 0.00041"
    assert words.ends(-math.inf, -1e-9) == "−infinity to 0"
