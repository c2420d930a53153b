"""Tables of formatted cells, and their export to text, HTML, Markdown, LaTeX and pandas.

A class with a tabular representation implements `Tabular.layout`. All exports use it.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain, compress, zip_longest
from operator import attrgetter
from textwrap import fill
from typing import Any, Literal, Self

from torchcalib._bridges import Advising
from torchcalib.display.words import decimals, p_words, printable, printable_lines, significant

_FOLDED = 16  # characters in a line of a name in a narrow table; long enough for the ends of bins


@dataclass(frozen=True)
class Cell:
    """Formatted table cell."""

    page: str = ""  # text in HTML, Markdown and LaTeX
    value: float | None = None  # the number in full precision; None for text
    style: str = ""  # CSS class: "main", "better", "worse", "quiet" or "name"
    link: str = ""  # id of the page element that the cell links to; empty for no link
    tip: str = ""  # explanation that a page shows on demand; empty for none

    @property
    def text(self) -> str:
        """Text in plain-text tables and DataFrames, with a hyphen for the minus sign."""
        return self.page.replace("−", "-")


@dataclass(frozen=True)
class Column:
    """Table column."""

    header: str
    cell: Callable[[Any], Cell]  # function from the item of a row, such as a dict, to its cell
    is_number: bool = True  # whether cells are aligned to the right
    # "always"; "wide": not in a narrow terminal; "page": in reports; "data": only in a DataFrame
    shown: Literal["always", "wide", "page", "data"] = "always"
    wraps: bool = False  # whether long cells continue on the next line
    # Functions from the item of a row to a value, by name of the DataFrame column. None creates one column from the
    # numbers or texts of the cells. Its name is the header with underscores.
    data: Mapping[str, Callable[[Any], Any]] | None = None

    @property
    def data_names(self) -> list[str]:
        """Names of the DataFrame columns that this column creates."""
        return [self.header.replace(" ", "_")] if self.data is None else list(self.data)

    def data_of(self, item: Any, cell: Cell) -> list[Any]:
        """Return the values of the DataFrame columns for the item of a row and its cell."""
        if self.data is not None:
            return [value(item) for value in self.data.values()]
        if not cell.page:
            return [math.nan if self.is_number else ""]
        return [cell.text if cell.value is None else cell.value]


def attribute_column(header: str, name: str, cell: Callable[[Any], Cell], **options: Any) -> Column:
    """Return the column of the attribute `name` of items, formatted by `cell`; in a DataFrame, the column `name`."""
    value = attrgetter(name)
    return Column(header, lambda item: cell(value(item)), data={name: value}, **options)


@dataclass(frozen=True)
class Row:
    """Table row."""

    cells: Sequence[Cell]  # the first is the row heading
    is_quiet: bool = False  # whether the row is displayed in a lighter colour because it is less important
    data: Sequence[Any] = ()  # DataFrame values, in the order of `Table.data_names`


@dataclass(frozen=True)
class Section:
    """Table rows under a common heading, which may be empty."""

    heading: str
    rows: Sequence[Row]


class Tabular(Advising, ABC):
    """Base class of objects that can be exported as a table, and that notebooks display as a table."""

    @abstractmethod
    def layout(self) -> "Table":
        """Return the table for all exports."""

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame, with numbers in full precision and NaN where a value is missing.

        Raises:
            ImportError: if pandas is not installed.
        """
        table = self.layout()
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                "`to_pandas` needs pandas, which is not installed. Install it: pip install 'torchcalib[pandas]'."
            ) from error
        rows = [[section.heading, *row.data] for section in table.sections for row in section.rows]
        frame = pd.DataFrame(rows, columns=[table.heading_name, *table.data_names])
        if not any(section.heading for section in table.sections):
            frame = frame.iloc[:, 1:]
        return frame.set_index(list(table.index)) if table.index else frame

    def to_markdown(self) -> str:
        """Return a Markdown table, with three significant digits."""
        table = self.layout().shown_on("always", "wide")

        def escaped(text: str) -> str:
            return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))

        def line(cells: Iterable[str]) -> str:
            return f"| {' | '.join(cells)} |"

        def heading(text: str) -> list[str]:
            return [line([f"**{escaped(text)}**", *[""] * (len(table.columns) - 1)])] if text else []

        return "\n".join(
            [
                *([f"**{escaped(table.title)}**", ""] if table.title else []),
                line(escaped(column.header) for column in table.columns),
                line("---:" if column.is_number else ":---" for column in table.columns),
                *_lines(table, heading, lambda row: line(escaped(cell.page) for cell in row)),
            ]
        )

    def to_latex(self) -> str:
        """Return a LaTeX `tabular` with three significant digits, which requires the package booktabs."""
        table = self.layout().shown_on("always", "wide")

        def escaped(text: str) -> str:
            return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))

        def line(cells: Iterable[str]) -> str:
            return f"{' & '.join(cells)} \\\\"

        def heading(text: str) -> list[str]:
            words = rf"\multicolumn{{{len(table.columns)}}}{{l}}{{\textbf{{{escaped(text)}}}}}"
            return [r"\midrule", *([line([words])] if text else [])]

        return "\n".join(
            [
                *([f"% {escaped(table.title)}"] if table.title else []),
                rf"\begin{{tabular}}{{{''.join('r' if column.is_number else 'l' for column in table.columns)}}}",
                r"\toprule",
                line(escaped(column.header) for column in table.columns),
                *_lines(table, heading, lambda row: line(escaped(cell.page) for cell in row)),
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )

    def __str__(self) -> str:
        """Return the table as plain text for a monospaced font."""
        return to_text(self.layout())

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        return to_html(self.layout().shown_on("always", "wide"))


@dataclass(frozen=True, repr=False)
class Table(Tabular):
    """Table of formatted cells in sections."""

    columns: Sequence[Column]  # from left to right
    sections: Sequence[Section]
    title: str = ""  # may be empty
    is_wide: bool = True  # whether the table has the full width of a page
    heading_name: str = "group"  # name of the DataFrame column with the section headings
    index: Sequence[str] = ()  # names of the DataFrame columns that form its index
    data_names: Sequence[str] = ()  # names of all DataFrame columns except `heading_name`
    is_stacked: bool = False  # whether each row is a block of names and values on a narrow page

    @classmethod
    def from_items(
        cls,
        columns: Sequence[Column],
        sections: Mapping[str, Iterable[Any]],
        title: str = "",
        *,
        is_wide: bool = True,
        is_quiet: Callable[[Any], bool] | None = None,
        heading_name: str = "group",
        index: Sequence[str] = (),
    ) -> Self:
        """Create a table with a row for each item in `sections`, by heading. Columns with only empty cells are omitted.

        `is_quiet` is a function from an item to `Row.is_quiet`.
        """

        def row(item: Any) -> Row:
            cells = [column.cell(item) for column in columns]
            data = [column.data_of(item, cell) for column, cell in zip(columns, cells, strict=True)]
            return Row(cells, is_quiet is not None and is_quiet(item), list(chain.from_iterable(data)))

        all_sections = [Section(heading, [row(item) for item in items]) for heading, items in sections.items()]
        rows = [each for section in all_sections for each in section.rows]
        has_content = [not rows or any(each.cells[k].page for each in rows) for k in range(len(columns))]
        names = list(chain.from_iterable(column.data_names for column in columns))
        return cls(columns, all_sections, title, is_wide, heading_name, index, names)._with_columns(has_content)

    def layout(self) -> "Table":
        """Return the table itself."""
        return self

    def __repr__(self) -> str:
        return str(self)

    def shown_on(self, *media: str) -> Self:
        """Return the table with only the columns whose `Column.shown` is in `media`."""
        return self._with_columns([column.shown in media for column in self.columns])

    def folded(self, with_names: bool = True) -> Self:
        """Return the table with headers, and on request names, in several lines, for a narrow terminal."""
        columns = [replace(column, header=column.header.replace(" ", "\n", 1)) for column in self.columns]

        def with_folded_name(row: Row) -> Row:
            name = row.cells[0]
            text = fill(printable(name.page), _FOLDED, break_long_words=False)
            return replace(row, cells=[replace(name, page=text), *row.cells[1:]])

        folds = with_names and not self.columns[0].wraps
        sections = [replace(section, rows=list(map(with_folded_name, section.rows))) for section in self.sections]
        return replace(self, columns=columns, sections=sections if folds else self.sections)

    def _with_columns(self, mask: Sequence[bool]) -> Self:
        sections = [
            Section(section.heading, [replace(row, cells=list(compress(row.cells, mask))) for row in section.rows])
            for section in self.sections
        ]
        return replace(self, columns=list(compress(self.columns, mask)), sections=sections)


def number(value: float | None, style: str = "") -> Cell:
    """Return a cell with three significant digits; empty for None."""
    return Cell() if value is None else Cell(significant(value), value, style=style)


def fraction(value: float, plus: str = "") -> Cell:
    """Return a cell with four decimals in all formats, and the prefix `plus` if the value is positive."""
    return Cell(decimals(value, plus), value)


def p_value(value: float | None) -> Cell:
    """Return a cell with a formatted p-value; empty for None."""
    return Cell() if value is None else Cell(p_words(value), value)


def interval(found: object) -> Cell:
    """Return a cell with the text of an interval; empty for None."""
    return Cell() if found is None else Cell(str(found))


def to_text(table: Table, with_page: bool = False) -> str:
    """Return a table as plain text for a monospaced font, on request with the columns that only pages show.

    Cells may have several lines. Headers of different height end in the same line, and other cells begin in the same
    one.
    """
    table = table.shown_on("always", "wide", *["page"] * with_page)
    headers = [column.header for column in table.columns]
    cells = [[cell.text for cell in row.cells] for section in table.sections for row in section.rows]
    columns = zip(headers, *cells, strict=True)
    widths = [max(len(line) for text in column for line in text.split("\n")) for column in columns]

    def line(row: Sequence[str], is_header: bool = False) -> str:
        step = -1 if is_header else 1
        lines = list(zip_longest(*(text.split("\n")[::step] for text in row), fillvalue=""))[::step]
        return "\n".join(
            "  ".join(
                text.rjust(width) if column.is_number else text.ljust(width)
                for column, text, width in zip(table.columns, texts, widths, strict=True)
            ).rstrip()
            for texts in lines
        )

    title = [table.title] if table.title else []
    body = _lines(table, lambda heading: [heading] if heading else [], lambda row: line([cell.text for cell in row]))
    return printable_lines("\n".join([*title, line(headers, is_header=True), *body]))


def _lines(
    table: Table, heading: Callable[[str], Sequence[str]], line: Callable[[Sequence[Cell]], str]
) -> Iterator[str]:
    """Yield the lines of all sections: those of the heading, which may be empty, and one for each row."""
    for section in table.sections:
        yield from heading(section.heading)
        yield from (line(row.cells) for row in section.rows)


def to_html(table: Table) -> str:
    """Return a table as an HTML element with escaped text. `<data value>` contains the exact number of a cell."""
    table = table.shown_on("always", "wide", "page")

    def classes(column: Column, style: str, wraps: bool = False) -> str:
        names = " ".join(filter(None, ("number" if column.is_number else "", "wraps" if wraps else "", style)))
        return f' class="{escape(names)}"' if names else ""

    def content(cell: Cell) -> str:
        text = escape(cell.page)
        if cell.link:
            return f'<a href="#{escape(cell.link)}">{text}</a>'
        if cell.tip:
            return f'<abbr tabindex="0" title="{escape(cell.tip)}">{text}</abbr>'
        if cell.value is not None:
            return f'<data value="{cell.value}">{text}</data>'
        return f"<bdi>{text}</bdi>" if cell.style == "name" else text

    def line(cells: Sequence[Cell], is_quiet: bool) -> str:
        (column, name), *others = zip(table.columns, cells, strict=True)
        first = f'<th scope="row"{classes(column, name.style)}>{content(name)}</th>'
        rest = [
            f"<td{classes(column, cell.style, column.wraps)}{label(column)}>{content(cell)}</td>"
            for column, cell in others
        ]
        return "".join(['<tr class="quiet">' if is_quiet else "<tr>", first, *rest, "</tr>"])

    def label(column: Column) -> str:
        return f' data-label="{escape(column.header)}"' if table.is_stacked else ""

    heads = ((column, classes(column, "", column.wraps)) for column in table.columns)
    cells = (f'<th scope="col"{names}>{escape(column.header)}</th>' for column, names in heads)
    kinds = " ".join(compress(("wide", "stacked"), (table.is_wide, table.is_stacked)))
    lines = [f'<table class="{kinds}">' if kinds else "<table>", f"<thead><tr>{''.join(cells)}</tr></thead>"]
    for section in table.sections:
        lines.append("<tbody>")
        if section.heading:
            span = len(table.columns)
            lines.append(f'<tr><th scope="rowgroup" colspan="{span}">{escape(section.heading)}</th></tr>')
        lines += [*(line(row.cells, row.is_quiet) for row in section.rows), "</tbody>"]
    return "\n".join([*lines, "</table>"])


_LATEX = {
    **{letter: f"\\{letter}" for letter in "#$%&_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "≈": r"$\approx$",
    "<": "$<$",
    ">": "$>$",
    "…": r"\ldots{}",
}
"""LaTeX code for special characters and for characters that LaTeX fonts lack."""
