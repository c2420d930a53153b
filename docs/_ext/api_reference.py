"""Members on the pages of classes, links by short names, and docstrings that Sphinx reads correctly.

Docstrings do not repeat the descriptions of shared arguments: those of input options are in `InputOptions`, the others
in `arguments.toml`.
"""

import inspect
import re
from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from types import FunctionType
from typing import Any

from docutils import nodes
from metric_pages import contents, pages
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer

from torchcalib.calibration import Calibrator
from torchcalib.core.ranked import LogitCells
from torchcalib.core.sums import BinStats
from torchcalib.io.opening import PredictionFiles
from torchcalib.io.rows import Rows
from torchcalib.metrics.base import CalibrationMetric, WrappedMetric

NAMESPACES = (
    *("functional", "calibration", "inference", "losses", "plots", "special", "integrations", "sklearn", "results"),
)
CALIBRATOR = ("fit", "forward", "predict_proba", "fit_from_hidden", "temperature", "predict_interval")
"""Members that the page of every calibrator shows, if the class has them."""
SUBCLASSING = (
    *("tasks", "whole_weights", "in_log_odds", "settings", "initial", "parameters_for", "calibrated", "remarks"),
)
"""Members that a new calibrator defines, which the page of the base class shows."""
INTERNAL = {
    "error_test", "extra_repr", "factory", "from_sample", "held", "input_line", "layout", "limit",
    "main_bins", "of_state", "publications", "rows_in_words", "setup", "state_key", "test_from",
}  # fmt: skip
"""Members for other modules of torchcalib."""

COLON = "\ue000"  # private character that stands for a colon
ENTRY = re.compile(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): .*(?:\n {5,}.*)*", re.MULTILINE)
"""Entry of a section "Args", of one or several names."""
ARGS = re.compile(r"^Args:\n((?: +.*\n?)+)", re.MULTILINE)
CODE = re.compile(r"(`[^`\n]*`|^ *(?:>>>|\.\.\.).*$)", re.MULTILINE)
ATTRIBUTES = re.compile(r"^:ivar (\w+(?:, \w+)+):(.*(?:\n .*)*)", re.MULTILINE)
RAISES = "Raises:\n    TypeError, ValueError: for invalid input.\n"
"""Section about the validation of the input, which all functions of predictions have in common."""


def directive_of(cls: type, name: str) -> str:
    """Return the autodoc directive for a member of a class."""
    value = inspect.getattr_static(cls, name, None)
    kinds = {"autoproperty": (property, cached_property), "automethod": (FunctionType, classmethod, staticmethod)}
    return next((directive for directive, types in kinds.items() if isinstance(value, types)), "autoattribute")


def shown_members(cls: type) -> list[str]:
    """Return the members on the page of a class: what torchcalib defines, and the main methods of a base class."""
    if issubclass(cls, Calibrator):
        # Calibrators may inherit `fit_from_hidden` without supporting it.
        names = [name for name in CALIBRATOR if hasattr(cls, name) and (name != "fit_from_hidden" or name in vars(cls))]
        return [*names, *(SUBCLASSING if cls is Calibrator else ())]
    own = {
        name: None
        for base in reversed(cls.__mro__)
        if base.__module__.startswith("torchcalib") and (base is cls or base not in (CalibrationMetric, WrappedMetric))
        for name, value in vars(base).items()
        if not name.startswith(("_", "on_")) and name not in INTERNAL and inspect.getdoc(value)
        if directive_of(cls, name) != "autoattribute"
    }
    if not issubclass(cls, CalibrationMetric) or cls is CalibrationMetric:
        return list(own)
    has_test = issubclass(cls, WrappedMetric) or cls.has_test
    first = ["update", "compute", *(["test"] if has_test else [])]
    return list(dict.fromkeys([*first, *own, "reset", "plot", "merge_state", "n_dropped"]))


def template_context() -> dict[str, Any]:
    """Return the variables of the templates: the members of each class, and the page of each metric or None."""
    modules = [import_module(name) for name in ("torchcalib", *(f"torchcalib.{space}" for space in NAMESPACES))]
    public = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}
    classes = {name: value for name, value in public.items() if inspect.isclass(value)}
    page_of = dict.fromkeys(name for name, cls in classes.items() if issubclass(cls, CalibrationMetric))
    for name, page in pages().items():
        page_of |= {f"{page.namespace}.{name}": name} | ({f"torchcalib.{page.cls.__name__}": name} if page.cls else {})
    for cls in (CalibrationMetric, BinStats, LogitCells, PredictionFiles, Rows):
        classes[f"{cls.__module__}.{cls.__name__}"] = cls
    members = {full: [(directive_of(cls, name), name) for name in shown_members(cls)] for full, cls in classes.items()}
    return {"shown_members": members, "page_of": page_of}


@cache
def shared_arguments() -> dict[str, str]:
    """Return the entry of each shared argument for a section "Args"."""
    texts = dict(contents("arguments"))
    options = ModuleAnalyzer.for_module("torchcalib.core.arguments").find_attr_docs()
    for (owner, name), lines in options.items():
        if owner == "InputOptions":
            texts.setdefault(name, " ".join("\n".join(lines).partition("\n\n")[0].split()))
    return {name: f"    {name}: {text}" for name, text in texts.items()}


def entries(doc: str) -> dict[str, str]:
    """Return the entries of the section "Args" of a docstring, by name."""
    section = ARGS.search(doc)
    found = ENTRY.finditer(section[1]) if section else ()
    return {name.strip(" *"): entry[0] for entry in found for name in entry[1].split(",")}


def completed(value: Any, doc: str) -> str:
    """Return the docstring of a function or class with an entry for every argument, in their order."""
    names = [name for name in inspect.signature(value).parameters if name != "self"]
    if "preds" in names and "Raises:" not in doc:
        doc = re.sub(r"^Returns:\n(?:(?: .*)?(?:\n|$))+", rf"\g<0>\n{RAISES}\n", doc, flags=re.MULTILINE)
    own = entries(doc)
    # A metric class has the options of its function.
    known = shared_arguments() | entries(inspect.getdoc(getattr(value, "function", None)) or "") | own
    section = dict.fromkeys([*(known[name] for name in names if name in known), *own.values()])
    if not section:
        return doc
    text = "Args:\n" + "\n".join(section) + "\n"
    if ARGS.search(doc):
        return ARGS.sub(lambda _: text, doc, count=1)
    return re.sub(r"^(?=[A-Z]\w+:$)|\Z", lambda _: f"{text}\n", f"{doc}\n\n", count=1, flags=re.MULTILINE)


def before_napoleon(app: Sphinx, what: str, name: str, obj: Any, options: object, lines: list[str]) -> None:  # noqa: ARG001
    """Complete the docstring of a function or class. In the summary of a property, a colon would follow a type."""
    if what in ("property", "attribute") and lines:
        lines[0] = lines[0].replace(":", COLON)
    if what in ("function", "method", "class") and lines and callable(obj):
        with suppress(ValueError):  # a built-in class has no signature
            lines[:] = completed(obj, "\n".join(lines)).split("\n")


def after_napoleon(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:  # noqa: ARG001
    """Restore colons, and escape vertical bars outside of code, which are absolute values and not substitutions.

    Divide an entry of attributes such as `low, high: text` into one for each name; Sphinx would read a type and a name.
    """
    parts = CODE.split("\n".join(lines).replace(COLON, ":"))
    parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
    text = ATTRIBUTES.sub(
        lambda found: "\n".join(f":ivar {name}:{found[2]}" for name in found[1].split(", ")), "".join(parts)
    )
    lines[:] = text.split("\n")


def resolve_short_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """Link a name such as `ece` that is documented in exactly one other namespace."""
    name = node.get("reftarget", "")
    domain = env.domains.python_domain
    if node.get("refdomain") != "py" or not name.isidentifier():
        return None
    objects = [each for role in ("class", "func") for each in domain.find_obj(env, None, None, name, role, 1)]
    found = [full for full, entry in objects if not entry.aliased]  # not the name in the module of the definition
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
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", after_napoleon)
    app.connect("missing-reference", resolve_short_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
