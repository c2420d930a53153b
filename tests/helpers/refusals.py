"""Tables of wrong calls: every row is tried, and all that fail are reported together."""

import pytest
from helpers.each import check_each


def assert_refused(rows):
    """Demand of each row (what, call, error, parts) that the call raises, with all parts in the message."""
    check_each(rows, assert_one_refused)


def assert_one_refused(row):
    _, call, error, parts = row
    with pytest.raises(error) as raised:
        call()
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{missing} missing in: {raised.value}"
