"""Tables as data: columns, rows and formatted cells, rendered as text, HTML, Markdown, LaTeX and pandas DataFrames.

Every object that is a table describes it once, by `Tabular.layout`.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain, compress
from typing import Any, Literal, Self

from torchcalib.core.words import decimals, fixed, p_words, significant


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
        data: the columns of a DataFrame that it becomes, functions from the item of a row by the name of the column. By
            default one: the header with underscores, and the number or the text of the cell.
    """

    header: str
    cell: Callable[[Any], Cell]
    is_number: bool = True
    shown: Literal["always", "wide", "page"] = "always"
    wraps: bool = False
    data: Mapping[str, Callable[[Any], Any]] | None = None

    @property
    def data_names(self) -> list[str]:
        """Names of its columns in a DataFrame."""
        return [self.header.replace(" ", "_")] if self.data is None else list(self.data)

    def data_of(self, item: Any, cell: Cell) -> list[Any]:
        """Return the values of a row in a DataFrame."""
        if self.data is not None:
            return [value(item) for value in self.data.values()]
        if cell.is_empty:
            return [math.nan if self.is_number else ""]
        return [cell.text if cell.value is None else cell.value]


@dataclass(frozen=True)
class Row:
    """Cells, the first of which names the row. A quiet row matters less than the others. `data` is for DataFrames."""

    cells: Sequence[Cell]
    is_quiet: bool = False
    data: Sequence[Any] = ()


@dataclass(frozen=True)
class Section:
    """Rows under a heading, which may be empty."""

    heading: str
    rows: Sequence[Row]


class Tabular(ABC):
    """An object that is a table: it can be shown in a notebook and exported."""

    @abstractmethod
    def layout(self) -> "Table":
        """Return the columns and rows, from which all exports follow."""

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame, with numbers in full precision and NaN where a value is missing.

        Raises:
            ImportError: pandas is not installed.
        """
        return to_pandas(self.layout())

    def to_markdown(self) -> str:
        """Return a Markdown table, with four significant digits."""
        return to_markdown(self.layout())

    def to_latex(self) -> str:
        """Return a LaTeX `tabular`, with four significant digits. It needs the LaTeX package booktabs."""
        return to_latex(self.layout())

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return to_html(self.layout().shown_on("always", "wide"))


@dataclass(frozen=True, repr=False)
class Table(Tabular):
    """A table as data.

    Attributes:
        columns: in order.
        sections: rows under headings.
        title: of the table.
        is_wide: whether the table takes the whole width of a page.
        heading_name: name of the column with the headings of sections in a DataFrame.
        index: names of the columns of a DataFrame that are its index.
        data_names: names of all columns of a DataFrame but that of the headings.
    """

    columns: Sequence[Column]
    sections: Sequence[Section]
    title: str = ""
    is_wide: bool = True
    heading_name: str = "group"
    index: Sequence[str] = ()
    data_names: Sequence[str] = ()

    @classmethod
    def of(
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
        """Return the table of items by headings, without columns that are empty in every row."""

        def row(item: Any) -> Row:
            cells = [column.cell(item) for column in columns]
            data = [column.data_of(item, cell) for column, cell in zip(columns, cells, strict=True)]
            return Row(cells, is_quiet is not None and is_quiet(item), list(chain.from_iterable(data)))

        made = [Section(heading, [row(item) for item in items]) for heading, items in sections.items()]
        rows = [each for section in made for each in section.rows]
        full = [not rows or not all(each.cells[k].is_empty for each in rows) for k in range(len(columns))]
        names = list(chain.from_iterable(column.data_names for column in columns))
        return cls(columns, made, title, is_wide, heading_name, index, names)._with_columns(full)

    def layout(self) -> "Table":
        """Return the table itself."""
        return self

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return to_text(self)

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


def to_html(table: Table) -> str:
    """Return a table as an HTML element, with all text escaped. The exact number of a cell is its `<data value>`."""

    def classes(column: Column, style: str) -> str:
        names = " ".join(filter(None, ("number" if column.is_number else "", style)))
        return f' class="{escape(names)}"' if names else ""

    def content(cell: Cell) -> str:
        text = escape(cell.page)
        if cell.link:
            return f'<a href="#{escape(cell.link)}">{text}</a>'
        if cell.bar is not None:
            endless = math.isinf(cell.bar)
            return '<span class="endless"></span>' if endless else f'<span style="width: {cell.bar:.2f}%"></span>'
        if cell.value is not None:
            return f'<data value="{cell.value}">{text}</data>'
        return f"<bdi>{text}</bdi>" if cell.style == "name" else text

    def row_of(row: Row) -> str:
        pairs = list(zip(table.columns, row.cells, strict=True))
        (column, name), *others = pairs
        first = f'<th scope="row"{classes(column, name.style)}>{content(name)}</th>'
        cells = [f"<td{classes(column, cell.style)}>{content(cell)}</td>" for column, cell in others]
        return "".join(['<tr class="quiet">' if row.is_quiet else "<tr>", first, *cells, "</tr>"])

    def lines() -> Iterator[str]:
        yield '<table class="wide">' if table.is_wide else "<table>"
        heads = [(column, "wraps" if column.wraps else "") for column in table.columns]
        cells = (f'<th scope="col"{classes(column, style)}>{escape(column.header)}</th>' for column, style in heads)
        yield f"<thead><tr>{''.join(cells)}</tr></thead>"
        for section in table.sections:
            yield "<tbody>"
            if section.heading:
                span = len(table.columns)
                yield f'<tr><th scope="rowgroup" colspan="{span}">{escape(section.heading)}</th></tr>'
            yield from map(row_of, section.rows)
            yield "</tbody>"
        yield "</table>"

    return "\n".join(lines())


def to_markdown(table: Table) -> str:
    """Return a table in the Markdown of GitHub and of pandas. Headings of sections are rows in bold."""
    table = table.shown_on("always", "wide")

    def escaped(text: str) -> str:
        return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split()))

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def lines() -> Iterator[str]:
        if table.title:
            yield f"**{escaped(table.title)}**"
            yield ""
        yield line(escaped(column.header) for column in table.columns)
        yield line("---:" if column.is_number else ":---" for column in table.columns)
        for section in table.sections:
            if section.heading:
                yield line([f"**{escaped(section.heading)}**", *[""] * (len(table.columns) - 1)])
            yield from (line(escaped(cell.page) for cell in row.cells) for row in section.rows)

    return "\n".join(lines())


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
"""LaTeX for characters that have a meaning there, or that are not in its fonts."""


def to_latex(table: Table) -> str:
    """Return a table as a LaTeX `tabular` with the rules of the package booktabs."""
    table = table.shown_on("always", "wide")

    def escaped(text: str) -> str:
        return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))

    def line(cells: Iterable[str]) -> str:
        return f"{' & '.join(cells)} \\\\"

    def lines() -> Iterator[str]:
        if table.title:
            yield f"% {escaped(table.title)}"
        yield rf"\begin{{tabular}}{{{''.join('r' if column.is_number else 'l' for column in table.columns)}}}"
        yield r"\toprule"
        yield line(escaped(column.header) for column in table.columns)
        for section in table.sections:
            yield r"\midrule"
            if section.heading:
                yield line([rf"\multicolumn{{{len(table.columns)}}}{{l}}{{\textbf{{{escaped(section.heading)}}}}}"])
            yield from (line(escaped(cell.page) for cell in row.cells) for row in section.rows)
        yield r"\bottomrule"
        yield r"\end{tabular}"

    return "\n".join(lines())


def to_pandas(table: Table) -> Any:
    """Return a table as a pandas DataFrame, with numbers in full precision and NaN where a value is missing.

    Raises:
        ImportError: pandas is not installed.
    """
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
