"""Tables of wrong calls: every row is tried, and all that fail are reported together."""


def assert_refused(rows):
    """Demand of each row (what, call, error, parts) that the call raises, with all parts in the message."""
    failed = [f"{what}: {why}" for what, call, error, parts in rows if (why := why_not_refused(call, error, parts))]
    assert not failed, "\n".join(failed)


def why_not_refused(call, error, parts):
    """None if the call raises as it must; any other exception counts as a failure of this row alone."""
    try:
        value = call()
    except Exception as raised:
        if not isinstance(raised, error):
            return f"raised {type(raised).__name__}: {raised}"
        missing = [part for part in parts if part not in str(raised)]
        return f"{missing} missing in: {raised}" if missing else None
    return f"returned {value!r}"
