"""Texts of bin edges."""

import pytest
import torch
from helpers.tables import blocks_of

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
