"""Checks for tables of inputs and of wrong calls. Every row is checked, and all failures are listed."""

from functools import partial

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


def assert_refused(rows):
    """Check for each row (description, call, error, parts) that the call raises an error that contains all parts.

    A message has at most 500 characters.
    """

    def is_refused(row):
        _, call, error, parts = row
        with pytest.raises(error) as raised:
            call()
        missing = [part for part in parts if part not in str(raised.value)]
        assert not missing, f"{missing} missing in: {raised.value}"
        assert len(str(raised.value)) <= 500

    check_each(rows, is_refused)


def assert_named(call, wrong):
    """Check that each wrong value raises an error that names the argument.

    Args:
        call: function that must raise an error.
        wrong: lists of wrong values by argument name. A dict contains the wrong value and other arguments.
    """
    rows = [(name, value) for name, values in wrong.items() for value in values]
    options = [(name, value if isinstance(value, dict) else {name: value}) for name, value in rows]
    assert_refused(
        (f"{call} {given}", partial(call, **given), (TypeError, ValueError), [f"`{name}` must", "got"])
        for name, given in options
    )
