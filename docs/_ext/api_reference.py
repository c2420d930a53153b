"""Select the members on API pages, and make docstrings valid reStructuredText."""

import inspect
import re
from functools import cached_property
from importlib import import_module
from typing import Any

from docutils import nodes
from metric_pages import pages
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.environment import BuildEnvironment

from torchcalib.calibration import Calibrator
from torchcalib.core.ranked import LogitCells
from torchcalib.core.sums import BinStats
from torchcalib.io.opening import PredictionFiles
from torchcalib.io.rows import Rows
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.wrappers import WrappedMetric

METRIC = ("update", "compute", "reset", "plot", "merge_state", "n_dropped")
"""Methods of the base class that the page of every metric class shows, beside `test`."""
CALIBRATOR = ("fit", "forward", "predict_proba")
"""Methods of the base class that the page of every calibrator shows."""
SUBCLASSING = (
    "tasks",
    "whole_weights",
    "in_log_odds",
    "settings",
    "initial",
    "parameters_for",
    "calibrated",
    "remarks",
)
"""Members that a new calibrator defines, which the page of the base class shows."""
INTERNAL = {
    "error_test", "extra_repr", "factory", "from_bins", "from_sample", "held", "input_line", "layout", "limit",
    "of_state", "publications", "setup", "state_key", "test_formula", "test_from",
}  # fmt: skip
"""Members for other modules of torchcalib."""

_COLON = "\ue000"  # private character that stands for a colon

NAMESPACES = (
    *("", "functional", "calibration", "inference", "losses", "plots", "special", "integrations", "sklearn", "results"),
)


MODULES = ("metrics.base", "core.sums", "core.ranked")
"""Further modules with documented objects."""


def _is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, classmethod | staticmethod | property | cached_property)


def own_members(cls: type) -> list[str]:
    """Return the public methods and properties that torchcalib defines for a class, those of base classes first."""
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("torchcalib")]
    shared = (CalibrationMetric, WrappedMetric, Calibrator)
    names = {
        name: None
        for base in bases
        if base is cls or base not in shared
        for name, value in vars(base).items()
        if _is_method(value) and not name.startswith(("_", "on_")) and inspect.getdoc(value)
    }
    return [name for name in names if name not in INTERNAL]


def shown_members(cls: type) -> list[str]:
    """Return the names of the members that the page of a class shows."""
    if cls is Calibrator:
        return [*CALIBRATOR, *SUBCLASSING]
    if issubclass(cls, Calibrator):
        extra = [name for name in ("temperature", "predict_interval") if hasattr(cls, name)]
        return [*CALIBRATOR, *(name for name in ("fit_from_hidden",) if name in vars(cls)), *extra]
    if issubclass(cls, CalibrationMetric) and cls is not CalibrationMetric:
        has_test = issubclass(cls, WrappedMetric) or cls.test_from is not CalibrationMetric.test_from
        return list(dict.fromkeys([*METRIC[:2], *(["test"] if has_test else []), *own_members(cls), *METRIC[2:]]))
    return own_members(cls)


def directive_of(cls: type, name: str) -> str:
    """Return the autodoc directive for a member of a class."""
    value = inspect.getattr_static(cls, name, None)
    if isinstance(value, property | cached_property):
        return "autoproperty"
    return "automethod" if _is_method(value) else "autoattribute"


def template_context() -> dict[str, Any]:
    """Return the variables of the templates: the members of each class, all metrics, and the pages of metrics."""
    members: dict[str, list[tuple[str, str]]] = {}
    metrics = []
    for namespace in NAMESPACES:
        module = import_module(".".join(filter(None, ("torchcalib", namespace))))
        for name in module.__all__:
            try:
                value = getattr(module, name)
            except ImportError:  # an optional package is not installed
                continue
            if inspect.isclass(value):
                members[f"{module.__name__}.{name}"] = [(directive_of(value, m), m) for m in shown_members(value)]
                if issubclass(value, CalibrationMetric):
                    metrics.append(f"{module.__name__}.{name}")
    for cls in (CalibrationMetric, BinStats, LogitCells, PredictionFiles, Rows):
        members[f"{cls.__module__}.{cls.__name__}"] = [(directive_of(cls, m), m) for m in shown_members(cls)]
    page_of = {}
    for page in pages():
        page_of[f"{page.namespace}.{page.name}"] = page.name
        if page.cls is not None:
            page_of[f"torchcalib.{page.cls.__name__}"] = page.name
    return {"shown_members": members, "page_of": page_of, "metrics": metrics}


def separate_names(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:  # noqa: ARG001
    """Divide an entry such as `low, high: text` into one entry for each name; Sphinx would read a type and a name."""
    for k in range(len(lines) - 1, -1, -1):
        if found := re.match(r":(ivar|param) (\w+(?:, \w+)+): *(.*)", lines[k]):
            kind, names, text = found[1], found[2].split(", "), found[3]
            end = k + 1
            while end < len(lines) and lines[end].startswith(" "):
                end += 1
            other = text if end == k + 1 else f"See `{names[0]}`."
            lines[k : k + 1] = [f":{kind} {names[0]}: {text}"]
            lines[end:end] = [f":{kind} {one}: {other}" for one in names[1:]]


def hide_colons(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:  # noqa: ARG001
    """Replace colons in the summary of a property, before which napoleon would expect a type."""
    if what in ("property", "attribute") and lines:
        lines[0] = lines[0].replace(":", _COLON)


def escape_bars(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:  # noqa: ARG001
    """Escape vertical bars outside of code, which are absolute values and not substitutions. Restore colons."""
    for k, line in enumerate(lines):
        lines[k] = line = line.replace(_COLON, ":")
        if "|" in line and not line.lstrip().startswith((">>>", "...")):
            parts = re.split(r"(`[^`]*`)", line)
            parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
            lines[k] = "".join(parts)


def resolve_short_name(
    app: Sphinx,
    env: BuildEnvironment,
    node: pending_xref,
    content: nodes.Element,
) -> nodes.Element | None:
    """Link a name such as `ece` that is documented in exactly one other namespace."""
    name = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not re.fullmatch(r"\w+", name):
        return None
    domain = env.get_domain("py")
    qualified = [".".join(filter(None, ("torchcalib", space, name))) for space in (*NAMESPACES, *MODULES)]
    found = [full for full in qualified if full in domain.objects]
    if len(found) != 1:
        return None
    node["reftarget"] = found[0]
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, content)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the handlers and the variables of the templates; called by Sphinx."""
    app.config.autosummary_context = template_context()
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # the heading in the docstrings, instead of "Variables"
    app.connect("autodoc-process-docstring", hide_colons, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", separate_names)
    app.connect("autodoc-process-docstring", escape_bars)
    app.connect("missing-reference", resolve_short_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
