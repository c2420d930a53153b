"""Tables of calls that must raise."""


def assert_all_raise(table, *arguments):
    """Call everything in a table of (name, call, error, parts of the message), and name all that went wrong.

    A part is text that the message holds, or a compiled pattern that is found in it.
    """
    wrong = []
    for name, call, error, *parts in table:
        try:
            call(*arguments)
        except error as raised:
            said = str(raised)
            absent = [part for part in parts if not (part in said if isinstance(part, str) else part.search(said))]
            if absent:
                wrong.append(f"{name}: {said!r} lacks {absent}")
        except Exception as raised:
            wrong.append(f"{name}: raised {raised!r}, not {error}")
        else:
            wrong.append(f"{name}: raised nothing")
    assert not wrong, "\n".join(wrong)
