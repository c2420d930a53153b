"""Streaming scores: means over samples.

The state consists of 2 sums, or with `normalize` or `priors` of 3 sums per class.
"""

from typing import Any

from torchcalib.core.arguments import Task
from torchcalib.core.sums import ScoreSum
from torchcalib.functional.cost_matrix import read_costs
from torchcalib.functional.decision import bayes_risk
from torchcalib.functional.label_distribution import (
    entropy_gap,
    kl_divergence,
    ranking_score,
    squared_distance,
    total_variation,
)
from torchcalib.functional.proper_scores import accuracy, brier_score, ecd, nll, stratified_brier_score
from torchcalib.functional.risk_area import bayes_risk_area, check_classes, read_weight
from torchcalib.metrics.base import CalibrationMetric


class NLL(CalibrationMetric[ScoreSum], function=nll):
    """Streaming negative log-likelihood (NLL, log loss), in nats; see `nll`.

    Example:
        >>> import torch
        >>> metric = NLL(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.2284, dtype=torch.float64)
    """


class BrierScore(CalibrationMetric[ScoreSum], function=brier_score):
    """Streaming Brier score: mean squared distance between probabilities and outcomes; see `brier_score`.

    Example:
        >>> import torch
        >>> metric = BrierScore(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.0467, dtype=torch.float64)
    """

    plot_upper_bound = None  # 1 for a binary task


class StratifiedBrierScore(CalibrationMetric[ScoreSum], function=stratified_brier_score):
    """Streaming stratified Brier score: mean of the Brier scores of the classes; see `stratified_brier_score`.

    Example:
        >>> import torch
        >>> metric = StratifiedBrierScore(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.0450, dtype=torch.float64)
    """

    plot_upper_bound = None  # 1 for a binary task


class ECD(CalibrationMetric[ScoreSum], function=ecd):
    """Streaming entropic calibration difference (ECD), in nats; see `ecd`.

    Args:
        priors: Class priors that replace the class frequencies in the data, as in `NLL`.

    Example:
        >>> import torch
        >>> metric = ECD(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(-0.2504, dtype=torch.float64)
    """


class Accuracy(CalibrationMetric[ScoreSum], function=accuracy):
    """Streaming accuracy: fraction of samples whose most probable class is the true class; see `accuracy`.

    Example:
        >>> import torch
        >>> metric = Accuracy(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.6667, dtype=torch.float64)
    """

    is_differentiable = False


class TotalVariation(CalibrationMetric[ScoreSum], function=total_variation):
    """Streaming total variation distance between predictions and label distributions; see `total_variation`.

    Example:
        >>> import torch
        >>> metric = TotalVariation(task="multiclass")
        >>> metric.update(torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]]))
        >>> metric.compute()
        tensor(0.1000, dtype=torch.float64)
    """


class KLDivergence(CalibrationMetric[ScoreSum], function=kl_divergence):
    """Streaming Kullback-Leibler (KL) divergence of predictions from label distributions; see `kl_divergence`.

    Example:
        >>> import torch
        >>> metric = KLDivergence(task="multiclass")
        >>> metric.update(torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]]))
        >>> metric.compute()
        tensor(0.0582, dtype=torch.float64)
    """


class EntropyGap(CalibrationMetric[ScoreSum], function=entropy_gap):
    """Streaming mean entropy of predictions minus entropy of label distributions, in nats; see `entropy_gap`.

    Example:
        >>> import torch
        >>> metric = EntropyGap(task="multiclass")
        >>> metric.update(torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]]))
        >>> metric.compute()
        tensor(0.1429, dtype=torch.float64)
    """


class SquaredDistance(CalibrationMetric[ScoreSum], function=squared_distance):
    """Streaming squared distance between predictions and label distributions; see `squared_distance`.

    Example:
        >>> import torch
        >>> metric = SquaredDistance(task="multiclass")
        >>> metric.update(torch.tensor([[0.7, 0.3], [0.5, 0.5]]), torch.tensor([[9, 1], [4, 4]]))
        >>> metric.compute()
        tensor(0.0400, dtype=torch.float64)
    """


class RankingScore(CalibrationMetric[ScoreSum], function=ranking_score):
    """Streaming human ranking calibration score (RankCS); see `ranking_score`.

    Example:
        >>> import torch
        >>> metric = RankingScore(task="multiclass")
        >>> metric.update(torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.2, 0.3]]), torch.tensor([[8, 1, 1], [5, 4, 1]]))
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)
    """

    is_differentiable = False


class BayesRisk(CalibrationMetric[ScoreSum], function=bayes_risk):
    """Streaming Bayes risk: mean cost of the optimal decisions under the predictions; see `bayes_risk`.

    Example:
        >>> import torch
        >>> metric = BayesRisk(task="binary", cost=[[0, 1, 0.25], [1, 0, 0.25]])
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 0]))
        >>> metric.compute()
        tensor(0.1250, dtype=torch.float64)
    """

    def __init__(self, task: Task | None = None, **options: Any) -> None:
        super().__init__(task, **options)
        num_classes = self.input_format.num_classes if self.input_format.read_as == "multiclass" else 2
        if options.get("cost") is not None and num_classes is not None:
            read_costs(options["cost"], num_classes)

    is_differentiable = False


class BayesRiskArea(CalibrationMetric[ScoreSum], function=bayes_risk_area):
    """Streaming area under the Bayes risk curve: the proper score of a weight; see `bayes_risk_area`.

    Example:
        >>> import torch
        >>> metric = BayesRiskArea(task="binary", weight="beta22")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.0467, dtype=torch.float64)
    """

    def __init__(self, task: Task | None = None, **options: Any) -> None:
        super().__init__(task, **options)
        if self.input_format.read_as == "multiclass" and self.num_classes is not None:
            check_classes(read_weight(options.get("weight", "uniform"), rows=True), self.num_classes)
