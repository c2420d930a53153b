"""Calibration of each class against the rest, or of each label: error, noise floor, p-values and direction."""

import torch
from torch import Tensor

from torchcalib.inference.testing import CalibrationTest, ErrorTest, run_error_tests
from torchcalib.metrics.binned import ECE, ESCE
from torchcalib.reporting.catalogue import bins_of
from torchcalib.reporting.lines import Data
from torchcalib.results.lines import ClassLine

_LEAST_REPLICATES, _MIN_REPLICATES = 99, 999  # minimum numbers of simulated replicates, with many classes and with few
_MAX_SIMULATED = 2**22, 2**24  # maximum number of simulated bins over all classes and replicates; for multi-label


def class_lines(data: Data, tests: tuple[CalibrationTest, CalibrationTest] | None) -> tuple[ClassLine, ...]:
    """Return the calibration of each class or label from results of `class_tests`; an empty tuple if binary."""
    if "classwise" not in data.bins:
        return ()
    bins = data.bins["classwise"]
    gap = ESCE.from_bins(bins)
    columns = {"n": bins.n.sum(-1), "gap": gap, "value": ECE.from_bins(bins)}
    columns["frequency"] = gap.new_tensor(data.priors)
    if tests is not None:
        ece, esce = tests
        columns["noise_floor"] = ece.noise_floor
        columns["p_value"], columns["gap_p_value"] = _adjusted(ece.p_value), _adjusted(esce.p_value)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return tuple(ClassLine(index, **dict(zip(columns, row, strict=True))) for index, row in enumerate(rows))


def class_tests(data: Data) -> tuple[CalibrationTest, CalibrationTest] | None:
    """Return the tests of ECE and of the gap of each class `(C,)`; None if binary, or without sums by cluster."""
    if "classwise" not in data.bins:
        return None
    bins, clusters = data.bins["classwise"], None
    if data.clusters is not None and (clusters := data.clusters.get(bins_of("classwise"))) is None:
        return None
    errors = {"ece": ErrorTest(ECE.from_bins), "esce": ErrorTest(ESCE.from_bins, signed=True)}
    most = _MAX_SIMULATED[data.task == "multilabel"] // bins.n.numel()
    # Enough replicates for a significant p-value of one class after adjustment.
    n_replicates = min(max(_MIN_REPLICATES, 40 * len(data.priors)), max(_LEAST_REPLICATES, most))
    tests = run_error_tests(errors, bins, clusters=clusters, n_replicates=n_replicates)
    return tests["ece"], tests["esce"]


def _adjusted(p_values: Tensor) -> Tensor:
    """Adjust p-values `(m,)` for multiple testing by the method of Holm (family-wise error rate); NaN stays NaN.

    For ascending p_1, ..., p_m, the adjusted p_k is min(1, max_{j <= k} (m - j + 1) p_j).

    Reference:
        Holm: A simple sequentially rejective multiple test procedure (Scandinavian Journal of Statistics, 1979),
        sec. 3.
    """
    m = int(p_values.isfinite().sum())
    order = p_values.argsort()[:m]  # NaN is last
    scaled = p_values[order] * torch.arange(m, 0, -1, dtype=p_values.dtype, device=p_values.device)
    return torch.full_like(p_values, torch.nan).index_copy(0, order, scaled.cummax(0).values.clamp(max=1))
