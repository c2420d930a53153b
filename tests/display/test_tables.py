"""Tables of reports and comparisons have the same cells as text and in the terminal."""

import math

import pytest
from helpers.reports import quick_report
from helpers.systems import compared

from torchcalib.display.tables import Cell, Column, Table, fraction, number, to_text
from torchcalib.reporting.render import terminal
from torchcalib.results.comparison import difference_table
from torchcalib.results.report import line_table

COLUMNS = (
    Column("name", lambda item: Cell(item[0]), is_number=False),
    Column("value", lambda item: number(item[1])),
    Column("never", lambda item: Cell()),
    Column("detail", lambda item: fraction(item[1], "+"), shown="page"),
    Column("hidden", lambda item: Cell(item[0], tip="why"), shown="data"),
)


def test_text_of_a_table_is_aligned_and_omits_empty_columns():
    items = {"": [("a", 12.5)], "of two": [("longer", -3e-9), ("c", math.inf)]}
    table = Table.from_items(COLUMNS, items, is_quiet=lambda item: item[1] < 0)
    assert to_text(table).splitlines() == [
        "name       value",
        "a           12.5",
        "of two",
        "longer       ≈ 0",
        "c       infinite",
    ]
    assert [column.header for column in table.columns] == ["name", "value", "detail", "hidden"]
    assert [row.is_quiet for section in table.sections for row in section.rows] == [False, True, False]
    assert [column.header for column in Table.from_items(COLUMNS, {"": []}).columns][2] == "never", (
        "nothing is known of it"
    )


@pytest.mark.parametrize(
    "table",
    [
        lambda: line_table(quick_report("binary")),
        lambda: quick_report("binary").main_table.layout(),
        lambda: quick_report("binary").tests["positive"].layout(),
        lambda: difference_table(compared("binary"), "sure"),
    ],
)
def test_text_and_terminal_output_contain_every_cell(table, capsys):
    table = table()
    terminal._print_table(terminal._console(), table)
    shown = capsys.readouterr().out
    of_text, of_terminal = (
        [cell.text for section in table.shown_on(*where).sections for row in section.rows for cell in row.cells]
        for where in (("always", "wide"), ("always",))  # a terminal omits wide columns that do not fit
    )
    assert of_terminal
    assert all(text in to_text(table) for text in of_text)
    # Names are wrapped on a narrow terminal.
    assert all(word in shown for text in of_terminal for word in text.split())
