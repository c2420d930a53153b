"""One test for a table of inputs, which reports every failure."""

import pytest


def check_each(items, check):
    """Call `check` with every item, and fail with a line for each item whose check raised.

    `pytest.raises` and `pytest.fail` raise `pytest.fail.Exception`, which does not derive from `Exception`.
    """
    failed = []
    for item in items:
        try:
            check(item)
        except (Exception, pytest.fail.Exception) as error:
            failed.append(f"{item}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
