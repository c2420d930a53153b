"""Streaming metrics of selective prediction."""

from torchcalib.core.ranked import RankedSample
from torchcalib.functional.selective import (
    RiskCoverageCurve,
    accuracy_at_coverage,
    augrc,
    aurc,
    correctness_auroc,
    coverage_at_risk,
    eaurc,
    events_of,
    risk_at_coverage,
    risk_coverage_curve_of,
)
from torchcalib.metrics.base import CalibrationMetric


class SelectiveMetric(CalibrationMetric[RankedSample]):
    """Base class for streaming metrics of selective prediction.

    The state is that of the rank-based metrics. There is no gradient, and no test, because the metrics are not
    calibration errors.
    """

    is_differentiable = False

    def curve(self) -> RiskCoverageCurve:
        """Return the risk-coverage curve, over all ranks if `torch.distributed` is running.

        Raises:
            ValueError: for `CorrectnessAUROC` with the mode "classwise" of a multi-class task.
        """
        _, converts = events_of(self.input_format.read_as, self.settings["mode"])
        return risk_coverage_curve_of(self._synced_statistic(), converts)


class AURC(SelectiveMetric, function=aurc):
    """Streaming area under the risk-coverage curve (AURC); see `aurc`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> import torch
        >>> metric = AURC(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.0625, dtype=torch.float64)
    """


class EAURC(SelectiveMetric, function=eaurc):
    """Streaming excess area under the risk-coverage curve (E-AURC); see `eaurc`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> import torch
        >>> metric = EAURC(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.9, 0.6, 0.7]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.4583, dtype=torch.float64)
    """


class AUGRC(SelectiveMetric, function=augrc):
    """Streaming area under the generalised risk-coverage curve (AUGRC); see `augrc`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> import torch
        >>> metric = AUGRC(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.0312, dtype=torch.float64)
    """


class CorrectnessAUROC(SelectiveMetric, function=correctness_auroc):
    """Streaming AUROC of correctness; see `correctness_auroc`.

    AUROC is the area under the receiver operating characteristic curve. The state contains all samples, or a sketch if
    `resolution` is given.

    Example:
        >>> import torch
        >>> metric = CorrectnessAUROC(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
    """


class RiskAtCoverage(SelectiveMetric, function=risk_at_coverage):
    """Streaming selective risk at a coverage; see `risk_at_coverage`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> import torch
        >>> metric = RiskAtCoverage(task="binary", coverage=0.75)
        >>> metric.update(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.3333, dtype=torch.float64)
    """


class AccuracyAtCoverage(SelectiveMetric, function=accuracy_at_coverage):
    """Streaming accuracy at a coverage; see `accuracy_at_coverage`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> import torch
        >>> metric = AccuracyAtCoverage(task="binary", coverage=0.75)
        >>> metric.update(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.6667, dtype=torch.float64)
    """


class CoverageAtRisk(SelectiveMetric, function=coverage_at_risk):
    """Streaming coverage at a selective risk; see `coverage_at_risk`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> import torch
        >>> metric = CoverageAtRisk(task="binary", risk=0.05)
        >>> metric.update(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)
    """
