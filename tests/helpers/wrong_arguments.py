"""Tables of wrong values of arguments."""

from functools import partial

from helpers.refusals import assert_refused


def assert_named(call, wrong):
    """Demand that each wrong value raises an error that names the argument and what it must be.

    Args:
        call: what must raise.
        wrong: lists of wrong values by the argument's name. A dict has further arguments, with which a value is wrong.
    """
    rows = [(name, value) for name, values in wrong.items() for value in values]
    options = [(name, value if isinstance(value, dict) else {name: value}) for name, value in rows]
    assert_refused(
        (f"{call} {given}", partial(call, **given), (TypeError, ValueError), [f"`{name}` must", "got"])
        for name, given in options
    )
