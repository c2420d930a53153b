"""A table of inputs as one test, which reports all that fail."""

import pytest


def check_each(items, check):
    """Call `check` with every item; fail with a line for each item for which it raised.

    `pytest.raises` and `pytest.fail` raise an exception of pytest's own, which is no `Exception`.
    """
    failed = []
    for item in items:
        try:
            check(item)
        except (Exception, pytest.fail.Exception) as error:
            failed.append(f"{item}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
