"""Several binnings of the same sample, one above the other: steps at the frequencies, and headings that count."""

import numpy as np
import pytest
import torch
from helpers.tables import batch_of_blocks, simulated_blocks, small_blocks

from torchcalib import BinTable, bin_table
from torchcalib.plots import bin_comparison, to_svg


def test_steps_run_from_edge_to_edge_at_the_frequency_and_leave_gaps_where_bins_are_empty():
    table = small_blocks()
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
        (small_blocks, "3 bins of 3 to 5 samples, 1 empty"),
        (lambda: simulated_blocks([60]), "1 bin of 60 samples"),
        (lambda: simulated_blocks([1] * 3), "3 bins of 1 sample"),
        (lambda: simulated_blocks([1200, 3400]), "2 bins of 1,200 to 3,400 samples"),
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
        bin_comparison({"a": small_blocks(), "b": batch_of_blocks()})


def test_plain_bin_tables_are_compared_too():
    table = small_blocks()
    plain = BinTable(*(getattr(table, name) for name in BinTable.__dataclass_fields__))
    assert to_svg(bin_comparison({"x": plain})) == to_svg(bin_comparison({"x": table}))
