"""Checks for tables: every row is checked, and all failures are listed. Calls that raise errors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Refusal:
    """A call that raises an error, and the call that follows from the advice of its message."""

    call: Callable[[], Any]
    text: str
    error: type[Exception] | tuple[type[Exception], ...] = ValueError
    remedy: Callable[[], Any] | None = None


def assert_message(message, text):
    """Check the parts of a text, and the form "`name` must <rule>, got <found>. <Remedy>." if the text has it."""
    place = 0
    for part in text.split(" ... "):
        place = message.find(part, place)
        assert place >= 0, f"{part!r} missing in: {message}"
        place += len(part)
    assert len(message) <= 500
    if "must" in text:
        assert "got" in message, message
    assert message.isprintable()


def assert_refused(row):
    with pytest.raises(row.error) as raised:
        row.call()
    assert_message(str(raised.value.args[0]), row.text)
