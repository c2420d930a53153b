"""Tables as data: columns, rows and formatted cells. `to_text` makes plain text of a table, `table.jinja` a page's.

A report, a comparison and a terminal describe each of their tables once, in `torchcalib.reporting.contents`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torchcalib.inference.words import decimals, fixed, p_words, significant


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        header: above the column.
        is_number: whether cells are aligned on the right.
        shown: on which media. A narrow terminal has no `"wide"` column, and only a page has a `"page"` column.
        wraps: whether long cells continue on the next line.
    """

    header: str
    is_number: bool = True
    shown: Literal["always", "wide", "page"] = "always"
    wraps: bool = False


@dataclass(frozen=True)
class Cell:
    """A formatted cell.

    Attributes:
        page: text on a page.
        value: the number that the text is made of, in full precision; None for text.
        plain: text elsewhere; by default that of the page, with a hyphen for the minus sign.
        style: a class of the page's style sheet: `"main"`, `"better"`, `"worse"`, `"quiet"` or `"question"`.
        link: id of the page's element that the cell refers to.
        bar: length of a bar in percent, infinite for one without an end; None for no bar.
    """

    page: str = ""
    value: float | None = None
    plain: str | None = None
    style: str = ""
    link: str = ""
    bar: float | None = None

    @property
    def text(self) -> str:
        """Text for other media than a page."""
        return self.page.replace("−", "-") if self.plain is None else self.plain


@dataclass(frozen=True)
class Row:
    """Cells, the first of which names the row. A quiet row matters less than the others."""

    cells: Sequence[Cell]
    is_quiet: bool = False


@dataclass(frozen=True)
class Section:
    """Rows under a heading."""

    rows: Sequence[Row]
    heading: str = ""
    explanation: str = ""


@dataclass(frozen=True)
class Table:
    """A table as data.

    Attributes:
        columns: in order.
        sections: rows under headings.
        title: what the table holds.
        is_wide: whether the table takes the whole width of a page.
    """

    columns: Sequence[Column]
    sections: Sequence[Section]
    title: str = ""
    is_wide: bool = True

    @classmethod
    def of_rows(
        cls, columns: Sequence[Column], rows: Iterable[Row], title: str = "", *, is_wide: bool = True
    ) -> "Table":
        """Return a table without headings of sections."""
        return cls(columns, [Section(list(rows))], title, is_wide)

    def limited_to(self, *shown: str) -> "Table":
        """Return the table with the columns of some media alone."""
        kept = [k for k, column in enumerate(self.columns) if column.shown in shown]
        sections = [
            Section([Row([row.cells[k] for k in kept], row.is_quiet) for row in section.rows], section.heading)
            for section in self.sections
        ]
        return Table([self.columns[k] for k in kept], sections, self.title)


def number(value: float | None, style: str = "") -> Cell:
    """Return the cell of a number: four significant digits on a page, six decimals in text; empty for None."""
    return Cell() if value is None else Cell(significant(value), value, fixed(value, 6), style)


def short(value: float) -> Cell:
    """Return the cell of a number with four significant digits everywhere."""
    return Cell(significant(value), value)


def fraction(value: float, plus: str = "") -> Cell:
    """Return the cell of a number with four decimals everywhere."""
    return Cell(decimals(value, plus), value)


def p_value(value: float | None) -> Cell:
    """Return the cell of a p-value; empty for None."""
    return Cell() if value is None else Cell(p_words(value), value)


def interval(found: object) -> Cell:
    """Return the cell of an interval; empty for None."""
    return Cell() if found is None else Cell(str(found).replace("-", "−"))


def to_text(table: Table) -> str:
    """Return a table as plain text in a font of equal widths."""
    table = table.limited_to("always", "wide")
    cells = [[cell.text for cell in row.cells] for section in table.sections for row in section.rows]
    texts = [[column.header for column in table.columns], *cells]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if column.is_number else text.ljust(width)
            for column, text, width in zip(table.columns, row, widths, strict=True)
        )
        return "  ".join(padded).rstrip()

    def lines() -> Iterator[str]:
        if table.title:
            yield table.title
        yield line(texts[0])
        for section in table.sections:
            if section.heading:
                yield section.heading
            yield from (line([cell.text for cell in row.cells]) for row in section.rows)

    return "\n".join(lines())
