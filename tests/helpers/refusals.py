"""Checks for tables: every row is checked, and all failures are listed."""

import pytest


def check_each(items, check):
    """Call `check` with every item, and fail with one line for each item whose check raised an error.

    `pytest.fail.Exception`, which `pytest.raises` and `pytest.fail` raise, does not derive from `Exception`.
    """
    failed = []
    for item in items:
        try:
            check(item)
        except (Exception, pytest.fail.Exception) as error:
            failed.append(f"{item}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
