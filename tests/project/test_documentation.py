"""Signatures and documentation of everything public: `help()`, editors and the site show them."""

import inspect
import re
from dataclasses import is_dataclass
from typing import Unpack, get_origin

import pytest
from processes import ROOT
from torch import Tensor

import torchcalib as tc
import torchcalib.torchmetrics
from torchcalib.cli.parser import make_parser

pytest.importorskip("matplotlib")  # for torchcalib.plots
NAMESPACES = (
    tc,
    tc.functional,
    tc.calibration,
    tc.inference,
    tc.losses,
    tc.plots,
    tc.special,
    tc.testing,
    tc.integrations,
    tc.sklearn,
    torchcalib.torchmetrics,
)
FORWARDING = {
    "BinaryCalibrationError",
    "CalibrationError",
    "MulticlassCalibrationError",
    "IgniteMetric",
    "bootstrap",
    "by_group",
    "from_hidden",
    "calibration_test",
    "get_scorer",
    "Bootstrapped",
    "ByGroup",
    "Clustered",
    "CalibrationCollection",
}
"""What hands other arguments on to a metric of the caller, or to torchmetrics."""


def public():
    """Yield every public callable once, with its name."""
    seen = set()
    for namespace in NAMESPACES:
        for name in namespace.__all__:
            try:
                value = getattr(namespace, name)
            except ImportError:  # an extra is not installed
                continue
            if callable(value) and id(value) not in seen:
                seen.add(id(value))
                yield name, value


def is_result(value):
    """Return whether a class holds what a function returns, rather than being made by the user."""
    return inspect.isclass(value) and (is_dataclass(value) or issubclass(value, tuple | dict | Warning))


def documented_names(doc):
    """Return the names of entries such as `name: text` or `first, second: text` in the sections of a docstring."""
    entries = re.findall(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): ", doc, re.MULTILINE)
    return {name.strip(" *") for entry in entries for name in entry.split(",")}


def test_every_argument_is_in_the_signature_and_documented(monkeypatch):
    """The site adds the entries of shared arguments, which docstrings do not repeat."""
    monkeypatch.syspath_prepend(str(ROOT / "docs/_ext"))
    site = pytest.importorskip("api_reference", reason="needs Sphinx", exc_type=ImportError)
    wrong = []
    for name, value in public():
        if inspect.isclass(value) and issubclass(value, dict | Warning | Tensor):
            continue  # these have the signature of a built-in class
        parameters = inspect.signature(value).parameters.values()
        docs = [inspect.getdoc(base) or "" for base in getattr(value, "__mro__", (value,))]  # fields may be inherited
        docs[0] = site.completed(value, docs[0])
        missing = {p.name for p in parameters} - set().union(*map(documented_names, docs))
        # `**options: Unpack[...]` names every option in its type
        hidden = [
            p.name
            for p in parameters
            if p.kind == p.VAR_KEYWORD and name not in FORWARDING and get_origin(p.annotation) is not Unpack
        ]
        if missing or hidden:
            wrong.append(f"{name}: not documented {sorted(missing)}, hides the options in {hidden}")
    assert not wrong, "\n".join(wrong)


def test_everything_that_users_call_has_an_example():
    without = [name for name, value in public() if not is_result(value) and "Example" not in inspect.getdoc(value)]
    assert not without


def test_every_command_has_a_section_with_its_generated_options():
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    commands = set(make_parser().commands)
    assert set(re.findall(r"^```\{cli-options\} (\w+)$", text, flags=re.MULTILINE)) == commands
    assert set(re.findall(r"^## torchcalib (\w+)$", text, flags=re.MULTILINE)) == commands
