"""Pages of the metrics, their overview and tables of the API, from metadata, docstrings and `metrics.toml`.

The text of each page is made by a template in `_templates` when Sphinx reads the page. The code on a page is executed.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import tomllib
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import torchcalib
from torchcalib.core.events import NamedMode
from torchcalib.core.state import SampleState
from torchcalib.metrics.base import CalibrationMetric

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
TEMPLATES = DOCS / "_templates"
IDENTIFIER = re.compile(r"(?:doi|arXiv)[ :]+([\w./-]*\w)")


@cache
def contents(name: str = "metrics") -> dict[str, Any]:
    """Return the contents of a TOML file of the documentation."""
    return tomllib.loads((DOCS / f"{name}.toml").read_text(encoding="utf-8"))


def defaults_of(cls: type[CalibrationMetric[Any]]) -> dict[str, Any]:
    """Return the fields of `metrics.toml` that follow from the declaration of a metric class."""
    low, high = (f"{bound:g}".replace("inf", "∞").replace("-", "−") for bound in cls.value_range)
    directions = {"higher": "higher is better", "lower": "lower is better"}
    return {
        "range": f"{'(' if '∞' in low else '['}{low}, {high}{')' if '∞' in high else ']'}",
        "band": cls.noise_increases or cls.better == "nearer to 0",
        "best": f"{cls.perfect:g}; {directions.get(cls.better or '', 'values of both signs are possible')}",
        "question": cls.question,
        "unit": cls.unit,
        "source": cls.source,
        **({} if cls.name == cls.__name__ else {"label": cls.name}),
    }


class Page:
    """Metric with the information that its page shows.

    Attributes:
        name: Name of the function.
        entry: Fields of `metrics.toml`, with all defaults.
        cls: Metric class, or None.
        function: Function that computes the metric.
        namespace: Name of the public module that contains the function.
    """

    def __init__(self, name: str, entry: dict[str, Any], cls: type[CalibrationMetric[Any]] | None) -> None:
        self.name = name
        self.cls = cls
        public = torchcalib.functional if hasattr(torchcalib.functional, name) else torchcalib.calibration
        self.namespace = public.__name__
        self.function = getattr(public, name)
        module = self.function.__module__.rpartition(".")[2]
        families = contents()["families"].items()
        acronym = re.search(r"\(([^()]+)\)$", entry["title"])
        self.entry = {
            "family": next((key for key, family in families if module in family.get("modules", ())), "gain"),
            "label": acronym[1] if acronym else entry["title"],
            "data": "multiclass",
            "options": "",
            "result": "",
            "figure": "scaling",
            "also": [],
            "caption": "",
            "origin": "",
            **(defaults_of(cls) if cls else {"band": False}),
            **entry,
        }

    @property
    def task(self) -> str:
        """Task of the example."""
        return "binary" if self.entry["data"] == "binary" else "multiclass"

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of the example."""
        return dict(eval(f"dict({self.entry['options']})"))  # the text is part of the documentation

    @property
    def blocks(self) -> list[str]:
        """Code of the example: five lines with the function, and others if there is a class."""
        kinds = ("function", "class") if self.cls else ("function",)
        return [rendered(f"example_{kind}.py.jinja", page=self, entry=self.entry).rstrip() for kind in kinds]

    @cached_property
    def executed(self) -> tuple[dict[str, Any], list[str]]:
        """Namespace of the example after its execution, and the output of each block."""
        names: dict[str, Any] = {}
        outputs = []
        for block in self.blocks:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block, "example", "exec"), names)  # code of this module
            outputs.append(output.getvalue().rstrip())
        return names, outputs

    def section(self, name: str) -> str:
        """Return a section of the docstring of the function, such as "Gradient", without short names of sources."""
        found = re.search(rf"^{name}:\n((?:    .*\n?|\n)+)", inspect.getdoc(self.function) or "", re.MULTILINE)
        return re.sub(r"\[(?:EPSR|ECD|TCE|TALK)\],? ?", "", " ".join(found[1].split())) if found else ""

    @property
    def tasks(self) -> str:
        """Tasks that the metric supports, with their modes if it has any."""
        if self.cls is None:
            return "binary, multi-class, multi-label"
        has_mode = "mode" in inspect.signature(self.function).parameters
        found = []
        for task, name in {"binary": "binary", "multiclass": "multi-class", "multilabel": "multi-label"}.items():
            modes = ", ".join(f'`"{mode}"`' for mode in get_args(NamedMode) if has_mode and self._accepts(task, mode))
            found.append(name + (f" ({modes})" if modes else ""))
        return ", ".join(found)

    def _accepts(self, task: str, mode: str) -> bool:
        sizes = {"multiclass": {"num_classes": 3}, "multilabel": {"num_labels": 3}}
        try:
            self.cls(task=task, **sizes.get(task, {}), **self.options | {"mode": mode})
        except (TypeError, ValueError):
            return False
        return True

    @property
    def state(self) -> tuple[str, str]:
        """Size of the state of the metric in the example, in one word and in a sentence."""
        if self.cls is None:
            return "—", "does not stream"
        names, _ = self.executed
        metric = names["metric"]
        if isinstance(metric.kind, SampleState):
            parts = metric.kind.parts(metric.state)
            size = sum(tensor.nbytes for part in parts if isinstance(part, list) for tensor in part)
            text = f"stores all samples: {size / len(names['target']):.0f} bytes for each in the example"
            has_sketch = "resolution" in self.cls.stream_options
            return "samples", f"{text}; with `resolution`, a sketch of constant size" if has_sketch else text
        size = metric.state.nbytes
        text = f"{size / 1000:,.0f} kB" if size > 9_999 else f"{size:,} bytes"
        return text, f"constant: {text} in the example"

    @property
    def gradient(self) -> tuple[str, str]:
        """Whether there is a gradient, in one word and as in the docstring."""
        text = self.section("Gradient") or "None."
        is_differentiable = self.cls.is_differentiable if self.cls else not text.startswith("None")
        return "yes" if is_differentiable else "no", text

    @property
    def test(self) -> str:
        """Description of the calibration test, with links."""
        if self.cls and self.cls.has_test:
            names, _ = self.executed
            has_interval = not bool(torch.as_tensor(names["metric"].test().low).isnan().any())
            interval = ", confidence interval" if has_interval else ""
            return f"`metric.test()`: [noise floor](../guide/noise_floor.md), p-value{interval}"
        if self.cls and self.cls.noise_increases and "component" in inspect.signature(self.function).parameters:
            return '[noise floor](../guide/noise_floor.md) with `component="noise_floor"`; no test'
        return "none; {py:func}`torchcalib.inference.bootstrap` computes intervals"


@cache
def pages() -> dict[str, Page]:
    """Return the page of each metric, by name of the function, in the order of `metrics.toml`."""
    public = [getattr(torchcalib, name) for name in torchcalib.__all__]
    classes = {cls.function.__name__: cls for cls in public if inspect.isclass(cls) and hasattr(cls, "function")}
    return {name: Page(name, entry, classes.get(name)) for name, entry in contents()["metrics"].items()}


# Filters of the templates


def linked(text: str, label: str = "") -> str:
    """Replace the DOIs and arXiv numbers in a text by links in Markdown."""
    sites = {True: "https://doi.org", False: "https://arxiv.org/abs"}
    return IDENTIFIER.sub(lambda found: f"[{label or found[0]}]({sites[found[1].startswith('10.')]}/{found[1]})", text)


def author_and_year(source: str) -> str:
    """Return the first author and the year of a source, linked to its first identifier."""
    first = source.split(",")[0]
    if re.match(r"\w+, \w+(?: & \w+)?,", source):
        first += " et al."
    if not (identifier := IDENTIFIER.search(source)):
        return first
    year = re.search(r"\b(?:19|20)\d\d\b(?!\.)", source)
    when = year[0] if year else f"20{identifier[1][:2]}"
    part = next(part for part in source.split(";") if identifier[0] in part).strip()
    return linked(identifier[0], f"{part.split(',')[0] if ';' in source else first} {when}")


def role(name: str) -> str:
    """Return a link to the API page of an object."""
    module, _, last = name.rpartition(".")
    return f"{{py:{'class' if inspect.isclass(getattr(import_module(module), last)) else 'func'}}}`{name}`"


def in_lines(code: str) -> str:
    """Divide a line of code that is wider than a page into two lines."""
    return code if len(code) < 88 else code.replace(", from_logits", ",\n    from_logits")


def cell(text: str) -> str:
    """Return a text for a cell of a table, where a vertical bar would end the cell."""
    return text.replace("|", r"\|")


def rendered(template: str, **names: Any) -> str:
    """Return the text of a template in `_templates`."""
    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, **options)
    environment.filters |= {each.__name__: each for each in (author_and_year, cell, in_lines, linked, role)}
    return environment.get_template(template).render(names, pages=pages(), families=contents()["families"])


def metric_page(page: Page, folder: Path) -> str:
    """Return the Markdown text of the page of a metric, and write its figures to a folder."""
    import metric_figures as figures

    with figures.settings():
        drawn = {"": figures.response(page), "_diagram": figures.diagram(page)}
        for suffix, figure in drawn.items():
            for theme, text in figures.svg_files(figure).items() if figure else ():
                (folder / f"{page.name}{suffix}_{theme}.svg").write_text(text, encoding="utf-8")
    return rendered("metric.md", page=page, entry=page.entry, has_diagram=bool(drawn["_diagram"]))


def api_page(namespace: str) -> str:
    """Return the API page of "torchcalib" or "torchcalib.functional", with a table for the metrics of each family."""
    is_listed = inspect.isfunction if namespace == "torchcalib.functional" else inspect.isclass
    module = import_module(namespace)
    public = {name: getattr(module, name) for name in module.__all__}
    functions = {name: getattr(value, "function", value) for name, value in public.items() if is_listed(value)}
    order = {name: k for k, name in enumerate(pages())}  # of functions
    tables = {}
    for family in contents()["families"].values():
        modules = {f"torchcalib.functional.{name}" for name in family.get("modules", ())}
        found = [name for name, function in functions.items() if function.__module__ in modules]
        tables[family["heading"]] = sorted(found, key=lambda name: order.get(functions[name].__name__, len(order)))
    return rendered(f"api/{namespace.rpartition('.')[2]}.md", namespace=namespace, tables=tables)


def read_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the text of a page of a metric; called by Sphinx."""
    folder, _, name = page.rpartition("/")
    if folder != "metrics":
        return
    metric = pages().get(name)
    module = inspect.getfile(metric.function) if metric else __file__
    for file in (DOCS / "metrics.toml", __file__, module, *TEMPLATES.glob("*.*")):
        app.env.note_dependency(str(file))
    source[0] = metric_page(metric, DOCS / "metrics/figures") if metric else rendered("metrics.md")


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the files that Sphinx and autosummary search for, before they do; called by Sphinx."""
    torch.set_num_threads(1)  # Sphinx forks processes, in which the threads of OpenMP do not exist
    (DOCS / "metrics/figures").mkdir(parents=True, exist_ok=True)
    files = {f"metrics/{name}.md": "% Made from metrics.toml by metric_pages.py\n" for name in ("index", *pages())}
    files |= {f"api/{name.rpartition('.')[2]}.md": api_page(name) for name in ("torchcalib", "torchcalib.functional")}
    for name, text in files.items():
        path = DOCS / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:  # else Sphinx would read it again
            path.write_text(text, encoding="utf-8")
    app.connect("source-read", read_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
