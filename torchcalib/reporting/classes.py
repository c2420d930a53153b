"""Calibration of each class against the rest, or of each label: error, noise floor, p-values and direction."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from torchcalib.core.sums import BinStats
from torchcalib.inference.testing import CalibrationTest, ErrorTest, run_error_tests
from torchcalib.metrics.binned import ECE, ESCE
from torchcalib.metrics.groups.table import SMALL_P, adjusted_p_values, resolved
from torchcalib.reporting.lines import Statistics, cluster_sums_name

_REPLICATES = 999
_MAX_SIMULATED = 2**21  # maximum number of simulated bins, over all classes and replicates

Direction = Literal["too high", "too low", "not significant", ""]


@dataclass(frozen=True)
class ClassLine:
    """Calibration of one class against the rest, or of one label.

    Attributes:
        index: number of the class or label, from 0.
        n: total weight of the samples, for a label of the samples in which it is known.
        frequency: frequency of the class or label, in [0, 1].
        gap: frequency minus mean probability.
        value: expected calibration error (ECE).
        noise_floor: expected ECE of a calibrated model. None if omitted, as are the p-values.
        p_value: p-value of ECE, adjusted for the number of classes by the method of Benjamini and Hochberg; see
            `torchcalib.inference.CalibrationTest`.
        gap_p_value: two-sided p-value of `gap`, adjusted in the same way.
    """

    index: int
    n: float
    frequency: float
    gap: float
    value: float
    noise_floor: float | None = None
    p_value: float | None = None
    gap_p_value: float | None = None

    @property
    def excess(self) -> float:
        """ECE minus its noise floor, or ECE without a noise floor; -inf if undefined. It orders the classes."""
        excess = self.value - (self.noise_floor or 0.0)
        return -math.inf if math.isnan(excess) else excess

    @property
    def direction(self) -> Direction:
        """Whether probabilities are too high or too low on average; empty if it was not tested."""
        if self.gap_p_value is None:
            return ""
        if not self.gap_p_value < SMALL_P:
            return "not significant"
        return "too low" if self.gap > 0 else "too high"


def class_lines(s: Statistics) -> tuple[ClassLine, ...]:
    """Return the calibration of each class or label, in the order of the classes; an empty tuple if binary."""
    if "classwise" not in s.bins:
        return ()
    bins = s.bins["classwise"]
    gap = ESCE.from_bins(bins)
    columns = {"n": bins.n.sum(-1), "gap": gap, "value": ECE.from_bins(bins)}
    columns["frequency"] = gap.new_tensor(s.priors)
    if (tests := _tests(s, bins)) is not None:
        ece, esce = tests
        columns["noise_floor"] = ece.noise_floor
        columns["p_value"], columns["gap_p_value"] = _adjusted(ece.p_value), _adjusted(esce.p_value)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return tuple(ClassLine(index, **dict(zip(columns, row, strict=True))) for index, row in enumerate(rows))


def _tests(s: Statistics, bins: BinStats) -> tuple[CalibrationTest, CalibrationTest] | None:
    """Return the tests of ECE and of the gap of each class `(C,)`; None if sums by cluster were not collected."""
    clusters = None
    if s.clusters is not None and (clusters := s.clusters.get(cluster_sums_name("classwise"))) is None:
        return None
    errors = {"ece": ErrorTest(ECE.from_bins), "esce": ErrorTest(ESCE.from_bins, signed=True)}
    n_replicates = min(_REPLICATES, max(99, _MAX_SIMULATED // bins.n.numel()))
    tests = run_error_tests(errors, bins, clusters=clusters, n_replicates=n_replicates)
    if clusters is not None:
        return tests["ece"], tests["esce"]

    def finer(name: str) -> CalibrationTest:
        def retest(classes: Tensor, n_more: int) -> CalibrationTest:
            most = max(n_replicates, _MAX_SIMULATED // (len(classes) * bins.n.shape[-1]))
            flag = bins.noise_flag
            flag = None if flag is None else flag.expand(bins.sums.shape[:-2])[classes]
            some = replace(bins, sums=bins.sums[classes], noise_flag=flag)
            return run_error_tests({name: errors[name]}, some, n_replicates=min(n_more, most))[name]

        return resolved(tests[name], retest, n_replicates)

    return finer("ece"), finer("esce")


def _adjusted(p_values: Tensor) -> Tensor:
    """Adjust the p-values of all classes with data for multiple testing."""
    known = p_values.isfinite()
    return torch.full_like(p_values, torch.nan).masked_scatter(known, adjusted_p_values(p_values[known]))
