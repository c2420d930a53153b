"""A table of inputs as one test, which reports all that fail."""


def check_each(items, check):
    """Call `check` with every item; fail with a line for each item for which it raised."""
    failed = []
    for item in items:
        try:
            check(item)
        except Exception as error:
            failed.append(f"{item}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
