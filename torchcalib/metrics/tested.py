"""Metrics that say how much of their value is chance, from what they have streamed."""

from abc import abstractmethod
from copy import deepcopy
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from torchcalib.inference.evidence import Evidence
from torchcalib.metrics.base import StreamingMetric

S = TypeVar("S")


class TestedMetric(StreamingMetric[S]):
    """A metric that is an error of calibration: chance makes it differ from that of a perfectly calibrated model."""

    is_signed: ClassVar[bool] = False
    """Whether the error is the mean gap, on both sides of 0."""

    def evidence(
        self, *, level: float = 0.95, n_replicates: int = 999, seed: int = 0, with_interval: bool = True
    ) -> Evidence:
        """Return the value with its noise floor, the p-value of "calibrated", and an interval; see `Evidence`.

        All follow from what was streamed, by all ranks if `torch.distributed` is running: outcomes are drawn anew as if
        the model were calibrated, and read as the data are. Rows are taken to be independent, and their confidences as
        given. Weights of an integer dtype are numbers of independent copies, floating ones say how much a row matters.
        Of soft targets the squared distance from the confidence is taken for their variance. Targets that are all 0 or
        1 are labels, whatever their dtype and in whatever pieces they came; series, labels and groups are looked at one
        by one. With floating weights, though, those of a floating dtype always count as soft; see `BinStats.noise`.
        Averages over classes take the outcomes of different classes for dependent: their p-value is a Cauchy
        combination. An average of signed errors is judged by its own size, with labels for independent; that over
        classes which exclude each other is 0 whatever the model, which is what its evidence says.

        Args:
            level: of the interval, in (0, 1).
            n_replicates: R; the least p-value is 1 / (R + 1).
            seed: of the draws, which are the same on every device.
            with_interval: False leaves the interval NaN, for which most of the time is needed.

        Returns:
            `Evidence` of the shape of the value. NaN without data. Where bins follow from the outcomes or decisions are
            counted (TCE), an error has no value without noise: the interval is that of its expected value at this
            number of samples, of which the noise floor is the least. Of smECE and ICI it is NaN, for it would take
            long; `torchcalib.bootstrap` has one of the value as it is, with what chance adds.

        Raises:
            TypeError, ValueError: for bad arguments, and if rows that came on CUDA were bad.

        Source:
            Broecker, Smith: Increasing the reliability of reliability diagrams (Weather and Forecasting, 2007), for the
            replicates; see `consistency.evidence_of` for the interval.

        Example:
            >>> import torch
            >>> from torchcalib import ECE
            >>> metric = ECE(task="binary", n_bins=2)
            >>> metric.update(torch.tensor([0.2, 0.7, 0.9, 0.8]), torch.tensor([0, 1, 0, 1]))
            >>> print(metric.evidence())
            0.1500 (noise floor 0.2311, 95 % 0.0000-0.5075, p = 1.00)
        """
        how = {"level": level, "n_replicates": n_replicates, "seed": seed, "with_interval": with_interval}
        return self.evidence_from(self._synced_statistic(), **how)

    @abstractmethod
    def evidence_from(self, statistic: S, **how: Any) -> Evidence:
        """Return the evidence of a statistic such as this metric's, which may have further axes in front.

        Args:
            statistic: with sums of noise, where it is bins.
            **how: those of `evidence`.
        """


def evidence(
    metric: TestedMetric[Any],
    preds: Tensor,
    target: Tensor,
    *,
    weights: Tensor | None = None,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
    with_interval: bool = True,
) -> Evidence:
    """Return a calibration error with its noise floor, the p-value of "calibrated" and an interval, in one call.

    Args:
        metric: an error such as `ECE(task="binary")`. It is taken for what it is, not for what it has seen, and left
            as it is.
        preds: as for its `update`: every axis but that of classes is samples, after its `batch_shape`.
        target: as for its `update`.
        weights: one non-negative weight per sample.
        level: of the interval, in (0, 1).
        n_replicates: R; the least p-value is 1 / (R + 1).
        seed: of the draws, which are the same on every device.
        with_interval: False leaves the interval NaN, for which most of the time is needed.

    Returns:
        See `TestedMetric.evidence`.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        None.

    Source:
        See `TestedMetric.evidence`.

    Example:
        >>> import torch
        >>> from torchcalib import ECE
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.8]), torch.tensor([0, 1, 0, 1])
        >>> found = evidence(ECE(task="binary", n_bins=2), preds, target)
        >>> round(found.value.item(), 4), round(found.p_value.item(), 2)
        (0.15, 1.0)
    """
    if not isinstance(metric, TestedMetric):
        raise TypeError(
            f"`metric` must be a calibration error of torchcalib such as ECE(task='binary'), got {metric!r}. "
            "Scores have no noise floor: `torchcalib.bootstrap` has their intervals. "
            "Cox and Spiegelhalter are tests already."
        )
    of_these = deepcopy(metric)
    of_these.reset()
    of_these.update(preds, target, weights=weights)
    return of_these.evidence(level=level, n_replicates=n_replicates, seed=seed, with_interval=with_interval)
