"""Several binnings of the same sample, one above the other: steps at the frequencies, and headings that count."""

import numpy as np
import pytest
from helpers.tables import batch_of_blocks, simulated_blocks, small_blocks

from torchcalib import BinTable
from torchcalib.plots import bin_comparison, to_svg


def test_steps_run_from_edge_to_edge_at_the_frequency_under_headings_that_count():
    table = small_blocks()
    plain = BinTable(*(getattr(table, name) for name in BinTable.__dataclass_fields__))
    ax = bin_comparison({"a": table, "$b": simulated_blocks([60]), "c": plain})
    first, second, third = ax.child_axes
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
    assert "<svg" in to_svg(ax)


def test_comparing_nothing_or_a_batch_is_refused_by_name():
    with pytest.raises(ValueError, match=r"`tables` must hold at least one table, got none\."):
        bin_comparison({})
    with pytest.raises(ValueError, match=r"`tables\['b'\]` must hold one series of bins"):
        bin_comparison({"a": small_blocks(), "b": batch_of_blocks()})
