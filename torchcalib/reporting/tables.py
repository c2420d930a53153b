"""Tables as data: columns, rows and formatted cells. `to_text` renders plain text.

A report, a comparison and a terminal describe each of their tables once, in `torchcalib.reporting.contents`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Literal, Self

from torchcalib.inference.words import decimals, fixed, p_words, significant


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

    @property
    def is_empty(self) -> bool:
        """Whether nothing is shown."""
        return not self.page and self.bar is None


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        header: above the column.
        cell: function from the item of a row to its cell.
        is_number: whether cells are aligned on the right.
        shown: on which media. A narrow terminal has no `"wide"` column, and only a page has a `"page"` column.
        wraps: whether long cells continue on the next line.
    """

    header: str
    cell: Callable[[Any], Cell]
    is_number: bool = True
    shown: Literal["always", "wide", "page"] = "always"
    wraps: bool = False


@dataclass(frozen=True)
class Row:
    """Cells, the first of which names the row. A quiet row matters less than the others."""

    cells: Sequence[Cell]
    is_quiet: bool = False


@dataclass(frozen=True)
class Section:
    """Rows under a heading, which may be empty."""

    heading: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Table:
    """A table as data.

    Attributes:
        columns: in order.
        sections: rows under headings.
        title: of the table.
        is_wide: whether the table takes the whole width of a page.
    """

    columns: Sequence[Column]
    sections: Sequence[Section]
    title: str = ""
    is_wide: bool = True

    @classmethod
    def of(
        cls,
        columns: Sequence[Column],
        sections: Mapping[str, Iterable[Any]],
        title: str = "",
        *,
        is_wide: bool = True,
        is_quiet: Callable[[Any], bool] | None = None,
    ) -> Self:
        """Return the table of items by headings, without columns that are empty in every row."""

        def row(item: Any) -> Row:
            return Row([column.cell(item) for column in columns], is_quiet is not None and is_quiet(item))

        made = [Section(heading, [row(item) for item in items]) for heading, items in sections.items()]
        rows = [each for section in made for each in section.rows]
        full = [not rows or not all(each.cells[k].is_empty for each in rows) for k in range(len(columns))]
        return cls(columns, made, title, is_wide)._with_columns(full)

    def shown_on(self, *media: str) -> Self:
        """Return the table with the columns of some media alone."""
        return self._with_columns([column.shown in media for column in self.columns])

    def _with_columns(self, kept: Sequence[bool]) -> Self:
        sections = [
            Section(section.heading, [replace(row, cells=list(compress(row.cells, kept))) for row in section.rows])
            for section in self.sections
        ]
        return replace(self, columns=list(compress(self.columns, kept)), sections=sections)


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
    table = table.shown_on("always", "wide")
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
