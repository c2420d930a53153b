"""Generate a page for every metric, their overview and tables of the API, from metadata, docstrings and `metrics.toml`.

The pages are written to `docs/metrics/` when a build starts. Nothing is computed if the sources of torchcalib and of
the pages have not changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import torchcalib
from torchcalib.core.state import SampleState
from torchcalib.metrics.base import CalibrationMetric

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
CONTENTS = DOCS / "metrics.toml"
REQUIRED = ("title", "family", "formula", "symbols", "range", "use", "avoid", "related", "data", "figure", "band")
"""Fields of every metric in `metrics.toml`."""
WITHOUT_CLASS = ("question", "unit", "best", "source")
"""Further fields of a metric that has no class, and therefore no metadata."""

_IDENTIFIER = re.compile(r"(?:doi|arXiv)[ :]+([\w./-]*\w)")
_TASKS = ("binary", "multiclass", "multilabel")
_MODES = ("positive", "top_label", "classwise")


def link_of(identifier: str) -> str:
    """Return the address of a DOI or an arXiv number."""
    return f"https://doi.org/{identifier}" if identifier.startswith("10.") else f"https://arxiv.org/abs/{identifier}"


def linked(text: str) -> str:
    """Replace the DOIs and arXiv numbers in a text by links in Markdown."""
    return _IDENTIFIER.sub(lambda found: f"[{found[0]}]({link_of(found[1])})", text)


def contents() -> dict[str, Any]:
    """Return the contents of `metrics.toml`."""
    return tomllib.loads(CONTENTS.read_text(encoding="utf-8"))


def classes() -> dict[str, type[CalibrationMetric[Any]]]:
    """Return all public metric classes, by the name of the function that computes the same metric."""
    public = [getattr(torchcalib, name) for name in torchcalib.__all__]
    declared = [cls for cls in public if inspect.isclass(cls) and hasattr(cls, "function")]
    return {cls.function.__name__: cls for cls in declared}


def family_of(module: str) -> str:
    """Return the key of the family of the metrics in a module; "gain" for a module that no family lists."""
    families = contents()["families"].items()
    return next((key for key, family in families if module.rpartition(".")[2] in family.get("modules", ())), "gain")


def interval(cls: type[CalibrationMetric[Any]]) -> str:
    """Return the range of values of a metric class as text, such as "[0, ∞)"."""
    low, high = (f"{bound:g}".replace("inf", "∞").replace("-", "−") for bound in cls.value_range)
    return f"{'(' if '∞' in low else '['}{low}, {high}{')' if '∞' in high else ']'}"


def completed(name: str, entry: Mapping[str, Any], cls: type[CalibrationMetric[Any]] | None) -> dict[str, Any]:
    """Return an entry of `metrics.toml` with the fields that follow from the declaration of the metric."""
    functions = torchcalib.functional if hasattr(torchcalib.functional, name) else torchcalib.calibration
    defaults = {
        "family": family_of(getattr(functions, name).__module__),
        "data": "multiclass",
        "figure": "scaling",
        "band": cls is not None and (cls.noise_increases or cls.better == "nearer to 0"),
    }
    if cls is not None:
        defaults |= {"range": interval(cls), **({} if cls.name == cls.__name__ else {"label": cls.name})}
    return defaults | dict(entry)


@dataclass(frozen=True)
class Page:
    """Metric with all information for its page."""

    name: str
    entry: Mapping[str, Any]
    cls: type[CalibrationMetric[Any]] | None

    @property
    def namespace(self) -> str:
        """Name of the module that contains the function."""
        return f"torchcalib.{'functional' if hasattr(torchcalib.functional, self.name) else 'calibration'}"

    @property
    def function(self) -> Any:
        """The function that computes the metric."""
        return getattr(getattr(torchcalib, self.namespace.rpartition(".")[2]), self.name)

    def metadata(self, name: str) -> Any:
        """Return an attribute of the class, or a field of `metrics.toml`, which replaces it."""
        return self.entry[name] if name in self.entry or self.cls is None else getattr(self.cls, name)

    @property
    def short(self) -> str:
        """Label of the metric in figures: its acronym, or its name if it has none."""
        if "label" in self.entry:
            return str(self.entry["label"])
        acronym = re.search(r"\(([^()]+)\)$", self.entry["title"])
        return acronym[1] if acronym else self.entry["title"]

    @property
    def options_text(self) -> str:
        """Further arguments of the example, as Python text that starts with a comma, or an empty string."""
        return f", {self.entry['options']}" if "options" in self.entry else ""

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of the example."""
        return dict(eval(f"dict({self.entry.get('options', '')})"))  # the text is part of the documentation

    @property
    def task(self) -> str:
        """Task of the example."""
        return "binary" if self.entry["data"] == "binary" else "multiclass"

    def section(self, name: str) -> str:
        """Return the text of a section of the docstring of the function, such as "Gradient"."""
        found = re.search(rf"^{name}:\n((?:    .*\n?|\n)+)", inspect.getdoc(self.function) or "", re.MULTILINE)
        return " ".join(found[1].split()) if found else ""

    def made(self, task: str | None = None, **options: Any) -> CalibrationMetric[Any]:
        """Return a metric with the options of the example."""
        task = task or self.task
        sizes = {} if task == "binary" else {"num_labels" if task == "multilabel" else "num_classes": 3}
        return self.cls(task=task, **sizes, **{**self.options, **options})


def pages() -> list[Page]:
    """Return all metrics in the order of `metrics.toml`."""
    by_function = classes()
    entries = contents()["metrics"].items()
    return [Page(name, completed(name, entry, by_function.get(name)), by_function.get(name)) for name, entry in entries]


# Examples: the code on a page is executed, and its output is shown.

_LOGITS = "torch.randn(1_000{classes}, generator=torch.manual_seed(0))"
_DATA = {
    "binary": f"logits = {_LOGITS.format(classes='')}\ntarget = logits.sigmoid().bernoulli().long()",
    "multiclass": f"logits = {_LOGITS.format(classes=', 3')}\ntarget = logits.softmax(-1).multinomial(1).squeeze(-1)",
    "counts": f"logits = {_LOGITS.format(classes=', 3')}\n"
    "target = torch.distributions.Multinomial(10, logits=logits).sample().long()  # annotators",
    "gaussian": "target = torch.randn(1_000, generator=torch.manual_seed(0))\n"
    "preds = torch.distributions.Normal(torch.zeros(1_000), 0.5)  # over-confident",
}
"""Two lines that simulate the data of an example. Predictions are `2 * logits`, which is over-confident."""


def in_lines(text: str) -> str:
    """Divide a call that is wider than a page into two lines."""
    return text if len(text) < 80 else text.replace(", from_logits", ",\n    from_logits")


def call(page: Page) -> str:
    """Return the call of the function in the example."""
    arguments = "preds, target" if page.entry["data"] == "gaussian" else "2 * logits, target, from_logits=True"
    if page.entry["data"] == "counts":
        arguments += ', task="multiclass"'  # counts could be multi-label targets
    return in_lines(f"torchcalib.{page.name}({arguments}{page.options_text}){page.entry.get('result', '')}")


def example(page: Page) -> list[str]:
    """Return the code blocks of the example: five lines with the function, and others if there is a class."""
    function = f"import torch\nimport torchcalib\n{_DATA[page.entry['data']]}\nprint({call(page)})"
    if page.cls is None:
        return [function]
    size = "" if page.task == "binary" else ", num_classes=3"
    options = f'task="{page.task}"{size}, from_logits=True{page.options_text}'
    lines = [
        in_lines(f"metric = torchcalib.{page.cls.__name__}({options})"),
        "for rows in torch.arange(1_000).split(100):",
        "    metric.update(2 * logits[rows], target[rows])",
        "print(metric.compute())",
    ]
    if has_test(page):
        lines.append("print(metric.test())")
    return [function, "\n".join(lines)]


def run(blocks: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Execute code blocks in one namespace. Return the namespace and the output of each block."""
    names: dict[str, Any] = {}
    outputs = []
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(block, "example", "exec"), names)  # code of this module
        outputs.append(output.getvalue().rstrip())
    return names, outputs


# Facts that are determined from the code


def has_test(page: Page) -> bool:
    """Return whether the class has a calibration test."""
    return page.cls is not None and page.cls.test_from is not CalibrationMetric.test_from


def tasks_of(page: Page) -> str:
    """Return the tasks that the metric supports, with their modes if it has any."""
    if page.cls is None:
        return str(page.entry.get("tasks", "binary, multi-class, multi-label"))
    names = {"binary": "binary", "multiclass": "multi-class", "multilabel": "multi-label"}
    has_mode = "mode" in inspect.signature(page.function).parameters
    found = []
    for task in _TASKS:
        modes = [mode for mode in _MODES if has_mode and _accepts(page, task, mode)]
        text = ", ".join(f'`"{mode}"`' for mode in modes)
        found.append(names[task] + (f" ({text})" if modes else ""))
    return ", ".join(found)


def _accepts(page: Page, task: str, mode: str) -> bool:
    try:
        page.made(task, mode=mode)
    except (TypeError, ValueError):
        return False
    return True


def state_of(page: Page, names: Mapping[str, Any]) -> tuple[str, str]:
    """Return the size of the state of the metric in the example, in one word and in a sentence."""
    if page.cls is None:
        return "—", "does not stream"
    metric = names["metric"]
    if isinstance(metric.kind, SampleState):
        parts = metric.kind.parts(metric.state)
        size = sum(tensor.nbytes for part in parts if isinstance(part, list) for tensor in part)
        text = f"stores all samples: {size / len(names['target']):.0f} bytes for each in the example"
        if "resolution" in page.cls.stream_options:
            text += "; with `resolution`, a sketch of constant size"
        return "samples", text
    size = metric.state.nbytes
    text = f"{size / 1000:,.0f} kB" if size > 9_999 else f"{size:,} bytes"
    return text, f"constant: {text} in the example"


def gradient_of(page: Page) -> tuple[str, str]:
    """Return whether there is a gradient, in one word and as in the docstring."""
    text = page.section("Gradient") or "None."
    is_differentiable = not text.startswith("None") if page.cls is None else page.cls.is_differentiable
    return "yes" if is_differentiable else "no", text


def best_of(page: Page) -> str:
    """Return the best value and the direction of improvement."""
    if "best" in page.entry:
        return str(page.entry["best"])
    direction = {"higher": "higher is better", "lower": "lower is better"}
    return f"{page.cls.perfect:g}; {direction.get(page.cls.better, 'values of both signs are possible')}"


def test_of(page: Page, names: Mapping[str, Any]) -> str:
    """Return a description of the calibration test, with links."""
    if page.name in ("total_variation", "kl_divergence", "entropy_gap", "squared_distance"):
        return '[noise floor](../guide/noise_floor.md) with `component="noise_floor"`; no test'
    if not has_test(page):
        return "none; {py:func}`torchcalib.inference.bootstrap` computes intervals"
    found = names["metric"].test()
    has_interval = not bool(torch.as_tensor(found.low).isnan().any())
    parts = ["[noise floor](../guide/noise_floor.md)", "p-value", *(["confidence interval"] if has_interval else [])]
    return f"`metric.test()`: {', '.join(parts)}"


# Text of the pages

_CAPTIONS = {
    "scaling": "Value for simulated predictions whose logits are multiplied by a factor. The model with factor 1 is "
    "calibrated.",
    "noise": "Value for simulated test sets of 1,000 samples. Noise is added to the logits of a calibrated model, "
    "which makes the order of the confidences worse.",
    "gaussian": "Value for simulated Gaussian predictions whose standard deviation is too small or too large. The "
    "model with ratio 1 is calibrated.",
    "risk_curve": "Bayes risk of simulated predictions whose logits are multiplied by a factor, divided by the risk of "
    "the better constant decision. The model with factor 1 is calibrated.",
}
_BAND = (
    "The grey band contains the values of 95% of calibrated models with the same predictions. A value in this band is "
    "compatible with calibration."
)
_WITHOUT_BAND = {
    "nll": "The mean is smallest for the calibrated model.",
    "brier_score": "The mean is smallest for the calibrated model.",
    "bayes_risk": "The mean is smallest for the calibrated model.",
    "bayes_risk_area": "The mean is smallest for the calibrated model.",
    "accuracy": "The factor does not change the most probable class, so accuracy is constant.",
    "calibration_loss": "Calibration does not improve the calibrated model.",
    "relative_calibration_loss": "Calibration does not improve the calibrated model.",
    "score_divergence": "The divergence of the calibrated model is nearly 0.",
}


def _image(name: str, alt: str) -> str:
    parts = [
        f"```{{image}} figures/{name}_{theme}.svg\n:alt: {alt}\n:class: only-{theme}\n:width: 100%\n```"
        for theme in ("light", "dark")
    ]
    return "\n".join(parts)


def _reference(kind: str, name: str) -> str:
    return f"{{py:{kind}}}`{name}`"


def _role_of(name: str) -> str:
    module, _, last = name.rpartition(".")
    value: Any = torchcalib
    for part in module.split(".")[1:]:
        value = getattr(value, part)
    return _reference("class" if inspect.isclass(getattr(value, last)) else "func", name)


def sentence(text: str) -> str:
    """Return a phrase as a sentence."""
    return f"{text[0].upper()}{text[1:]}."


def cell(text: str) -> str:
    """Return a text for a cell of a table, where a vertical bar would end the cell."""
    return text.replace("|", r"\|")


def page_text(
    page: Page, others: Mapping[str, Page], names: Mapping[str, Any], outputs: list[str], diagram: bool
) -> str:
    """Return the Markdown text of the page of a metric."""
    entry = page.entry
    function = _reference("func", f"{page.namespace}.{page.name}")
    objects = function if page.cls is None else f"{function}, {_reference('class', f'torchcalib.{page.cls.__name__}')}"
    rows = {
        "Range": entry["range"],
        "Unit": page.metadata("unit"),
        "Best value": best_of(page),
        "Tasks (modes)" if "`" in tasks_of(page) else "Tasks": tasks_of(page),
        "Gradient": gradient_of(page)[1],
        "State": state_of(page, names)[1],
        "Test": test_of(page, names),
        "Function and class" if page.cls else "Function": objects,
    }
    table = "\n".join(f"| **{name}** | {cell(text)} |" for name, text in rows.items())
    blocks = [
        f"```python\n{block}\n```\n\n```text\n{output}\n```"
        for block, output in zip(example(page), outputs, strict=True)
    ]
    parts = [f"# {entry['title']}", sentence(page.metadata("question")), blocks[0]]
    pictures = []
    if entry["figure"] != "none":
        caption = [_CAPTIONS[entry["figure"]], _BAND if entry["band"] else _WITHOUT_BAND.get(page.name, "")]
        if page.options:
            caption.append(f"The further arguments are those of the example, `{entry['options']}`.")
        pictures.append([_image(page.name, f"{page.short} of simulated predictions"), " ".join(filter(None, caption))])
    if diagram:
        drawn_by = (
            "metric.plot()" if page.cls else "torchcalib.reliability_diagram(2 * logits, target, from_logits=True)"
        )
        image = _image(f"{page.name}_diagram", f"Diagram of {page.short}")
        pictures.append([image, f"Drawn by `{drawn_by}` for the data of the example."])
    parts += pictures.pop(0)
    parts += [
        f"## Definition\n\n$$\n{entry['formula']}\n$$",
        entry["symbols"],
        f"| | |\n|---|---|\n{table}",
        f"## When to use it\n\n{entry['use']}",
        f"## When not to use it\n\n{entry['avoid']}",
    ]
    if page.cls:
        parts += [f"## Batch by batch{' and tested' if has_test(page) else ''}", *blocks[1:]]
    parts += chain.from_iterable(pictures)
    reference = re.sub(r"\[(?:EPSR|ECD|TCE|TALK)\],? ?", "", page.section("Reference"))
    parts.append(f"## Reference\n\n{linked(reference)}" if reference else "## Reference")
    parts.append(f"Source: {linked(page.metadata('source'))}.")
    if "origin" in entry:
        parts.append(f"First publication: {linked(entry['origin'])}.")
    related = [f"- [{others[name].entry['title']}]({name}.md)" for name in entry["related"]]
    also = [f"- {_role_of(name)}" for name in entry.get("also", ())]
    parts.append("## See also\n\n" + "\n".join(related + also))
    return "\n\n".join(parts) + "\n"


def author_and_year(source: str) -> str:
    """Return the first author and the year of a source, linked to its first identifier."""
    first = source.split(",")[0]
    if re.match(r"\w+, \w+(?: & \w+)?,", source):
        first += " et al."
    if not (identifier := _IDENTIFIER.search(source)):
        return first
    year = re.search(r"\b(?:19|20)\d\d\b(?!\.)", source)
    when = year[0] if year else f"20{identifier[1][:2]}"
    part = next(part for part in source.split(";") if identifier[0] in part).strip()
    return f"[{part.split(',')[0] if ';' in source else first} {when}]({link_of(identifier[1])})"


def index_text(found: list[Page], names: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the Markdown text of the overview. `names` contains the results of the example of each metric."""
    parts = [
        "# Metrics",
        "Each page has the formula, the range, a figure, an example and the source of a metric. "
        "[Which metric](../which_metric.md) helps to select one.",
        "The column *state* is the memory of the streaming class. The size of a constant state is that of the example "
        "on the page. The column *gradient* states whether the value is differentiable in the predictions.",
    ]
    for family, section in contents()["families"].items():
        rows = []
        for page in found:
            if page.entry["family"] == family:
                objects = f"`{page.name}`" + (f", `{page.cls.__name__}`" if page.cls else "")
                cells = (
                    f"[{page.entry['title']}]({page.name}.md)<br>{objects}",
                    page.metadata("question"),
                    f"{page.entry['range']}<br>{page.metadata('unit')}",
                    gradient_of(page)[0],
                    state_of(page, names[page.name])[0],
                    author_and_year(page.metadata("source")),
                )
                rows.append(f"| {' | '.join(map(cell, cells))} |")
        head = "| metric | description | range, unit | gradient | state | source |\n|---|---|---|---|---|---|"
        parts += [f"## {section['heading']}", section["introduction"], "\n".join([head, *rows])]
    parts.append(
        "## Tests, intervals and groups\n\n"
        "- {py:func}`torchcalib.inference.calibration_test`: noise floor, p-value and interval of a calibration error, "
        "as `metric.test()` of the classes. See [noise floor](../guide/noise_floor.md).\n"
        "- {py:func}`torchcalib.inference.bootstrap` and {py:class}`torchcalib.Bootstrapped`: bootstrap intervals of "
        "any metric.\n"
        "- {py:class}`torchcalib.Clustered`: tests and intervals for clusters of dependent rows.\n"
        "- {py:func}`torchcalib.functional.by_group` and {py:class}`torchcalib.ByGroup`: values for groups of rows. "
        "See [clusters and groups](../guide/clusters_and_groups.md).\n"
        "- {py:func}`torchcalib.functional.from_hidden`: values for hidden states and a linear head, without logits. "
        "See [causal models](../guide/causal_models.md)."
    )
    names = "\n".join(page.name for page in found)
    parts.append(f"```{{toctree}}\n:hidden:\n\n{names}\n```")
    return "\n\n".join(parts) + "\n"


# Tables of the API reference

TEMPLATES = DOCS / "_templates/api"


def declared(namespace: Any, module: str) -> list[str]:
    """Return the metrics that a module defines and a namespace contains, in the order of their definition."""
    found = vars(import_module(f"torchcalib.metrics.{module}"))
    public = {name for name in namespace.__all__ if getattr(found.get(name), "__module__", "").endswith(f".{module}")}
    is_listed = inspect.isfunction if namespace is torchcalib.functional else _is_metric
    return [name for name in found if name in public and is_listed(found[name])]


def _is_metric(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, CalibrationMetric)


def api_page(name: str) -> str:
    """Return the text of the page of a namespace, "torchcalib" or "functional", with a table for each family."""
    namespace = torchcalib if name == "torchcalib" else torchcalib.functional
    parts = []
    for family in contents()["families"].values():
        names = [each for module in family.get("modules", ()) for each in declared(namespace, module)]
        if names:
            options = "   :toctree: objects\n   :nosignatures:"
            table = f".. currentmodule:: {namespace.__name__}\n\n.. autosummary::\n{options}\n\n"
            table += "\n".join(f"   {each}" for each in names)
            parts.append(f"## {family['heading']}\n\n```{{eval-rst}}\n{table}\n```")
    return (TEMPLATES / f"{name}.md").read_text(encoding="utf-8").replace("{metrics}", "\n\n".join(parts))


def write_api_pages() -> None:
    """Write the generated pages of the API reference. Unchanged files keep their time."""
    for template in TEMPLATES.glob("*.md"):
        path, text = DOCS / "api" / template.name, api_page(template.stem)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


# Files


def made_files(found: list[Page]) -> Iterator[tuple[str, str]]:
    """Compute all pages and figures. Yield the name and the text of each file."""
    import metric_figures as figures

    others = {page.name: page for page in found}
    results = {}
    for page in found:
        names, outputs = run(example(page))
        results[page.name] = names
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fits that do not converge for extreme factors
            with figures.settings():
                figure = figures.figure_of(page.name, page.short, dict(page.entry), page.options)
                is_table = page.name == "calibration_curve"
                drawn = figures.diagram(names.get("metric"), eval(call(page), names) if is_table else None)
                for name, one in ((page.name, figure), (f"{page.name}_diagram", drawn)):
                    if one is not None:
                        for theme, text in figures.svg_files(one).items():
                            yield f"figures/{name}_{theme}.svg", text
            yield f"{page.name}.md", page_text(page, others, names, outputs, drawn is not None)
    yield "index.md", index_text(found, results)


def digest() -> str:
    """Return a checksum of everything that determines the pages."""
    package = Path(torchcalib.__file__).parent
    sources = [CONTENTS, *sorted(Path(__file__).parent.glob("metric_*.py")), *sorted(package.rglob("*.py"))]
    checksum = hashlib.sha256(torch.__version__.encode())
    for source in sources:
        checksum.update(source.read_bytes())
    return checksum.hexdigest()


def write_pages(folder: Path) -> None:
    """Write all pages and figures to a folder. Unchanged files keep their time, so that Sphinx does not read them."""
    stamp = folder / ".digest"
    current = digest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == current:
        return
    written = {stamp}
    for name, text in made_files(pages()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        written.add(path)
    for path in folder.rglob("*.*"):
        if path.is_file() and path not in written:
            path.unlink()
    stamp.write_text(current, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the generation of the pages; called by Sphinx."""
    write_api_pages()  # before Sphinx lists its sources, among which autosummary searches for tables
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir) / "metrics"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
