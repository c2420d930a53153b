"""Metadata of metric classes, which reports, comparisons, diagrams and pages read."""

import math
from inspect import isclass
from pkgutil import resolve_name
from typing import get_args

import public_names
import pytest
from torchmetrics import Metric

import torchcalib as tc
from torchcalib.metrics.base import Better, CalibrationMetric, WrappedMetric

OPTIONS = {tc.GCE: {"loss": lambda b: b.gap.abs()}}
PUBLIC = [getattr(tc, name) for name in tc.__all__]
METRICS = [
    cls for cls in PUBLIC if isclass(cls) and issubclass(cls, CalibrationMetric) and not issubclass(cls, WrappedMetric)
]


@pytest.fixture(params=METRICS, ids=lambda cls: cls.__name__)
def cls(request):
    return request.param


def test_every_metric_declares_what_it_is(cls):
    for name in ("key", "name", "question", "source", "unit"):
        assert isinstance(getattr(cls, name), str)
        assert getattr(cls, name)
    low, high = cls.value_range
    assert low <= cls.perfect <= high
    assert math.isfinite(cls.perfect)
    assert cls.better in (*get_args(Better), None)
    assert cls.higher_is_better == {"higher": True, "lower": False}.get(cls.better)


def test_demands_are_those_of_the_input_format(cls):
    input_format = cls(task="binary", **OPTIONS.get(cls, {})).input_format
    assert input_format.hard_targets == cls.needs_labels
    assert input_format.whole_weights == cls.needs_whole_weights


def test_keys_and_names_are_unique():
    for name in ("key", "name"):
        assert len({getattr(cls, name) for cls in METRICS}) == len(METRICS)


def test_diagrams_are_functions(cls):
    pytest.importorskip("matplotlib")
    for path in filter(None, (cls.diagram, cls.diagram_of_classes)):
        assert callable(resolve_name(path))


def test_wrapped_metrics_have_the_metadata_of_the_metric():
    names = [name for name in vars(WrappedMetric) if name in dir(tc.ECE) and name not in dir(Metric)]
    names = [name for name in names if isinstance(vars(WrappedMetric)[name], property) and name != "state"]
    esce = tc.ESCE(task="binary")
    for wrapped in (tc.Clustered(esce), tc.Bootstrapped(esce), tc.ByGroup(esce, num_groups=2)):
        assert {name: getattr(wrapped, name) for name in names} == {name: getattr(tc.ESCE, name) for name in names}


def test_namespaces_contain_every_declared_metric():
    assert public_names.FUNCTIONAL.read_text() == public_names.functional_text(), "run `python tests/public_names.py`"
    assert public_names.STUB.read_text() == public_names.stub_text(), "run `python tests/public_names.py`"
