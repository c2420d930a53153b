"""Streaming rank-based metrics, and tests of calibration by logistic regression and by the Brier score.

The state of a rank-based metric contains all samples: 5 bytes each for float32 predictions, 9 for multi-class logits,
plus 8 for weights. With `resolution` it is a sketch of constant size.
"""

from dataclasses import replace
from typing import Any

from torchcalib.core.arguments import Task
from torchcalib.core.ranked import RankedSample
from torchcalib.core.sums import Sums
from torchcalib.functional.logistic import CoxCalibration, cox, spiegelhalter
from torchcalib.functional.ranked import CORPDecomposition, atb, cllr, corp, ici, ks
from torchcalib.metrics.base import CalibrationMetric


class KS(CalibrationMetric[RankedSample], function=ks):
    """Streaming Kolmogorov-Smirnov (KS) calibration error; see `ks`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> import torch
        >>> metric = KS(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.0667, dtype=torch.float64)
    """


class CORP(CalibrationMetric[RankedSample], function=corp):
    """Streaming CORP decomposition of a score into miscalibration, discrimination and uncertainty; see `corp`.

    The state contains all samples, or a sketch if `resolution` is given. `decomposition()` returns all components.

    Args:
        component: Field of `CORPDecomposition` that `compute` returns: `"mcb"`, `"dsc"`, `"unc"` or `"score"`.

    Example:
        >>> import torch
        >>> metric = CORP(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 0, 1]))
        >>> metric.compute()
        tensor(0.1083, dtype=torch.float64)
    """

    def decomposition(self) -> CORPDecomposition:
        """Return all components of the decomposition, over all ranks if `torch.distributed` is running."""
        of_all = replace(self.estimator, component=None)  # type: ignore[call-arg]  # a `CORPEstimator`
        return CORPDecomposition(*of_all.value(self._synced_statistic()).unbind(-1))


class Cllr(CalibrationMetric[RankedSample], function=cllr):
    """Streaming cost of log-likelihood ratios (Cllr), min-Cllr or their difference, in bits; see `cllr`.

    The state contains all samples, or a sketch if `resolution` is given. `NLL(priors=[0.5, 0.5], normalize="prior")`
    computes Cllr from sums.

    Example:
        >>> import torch
        >>> metric = Cllr(task="binary", from_logits=True)
        >>> metric.update(torch.tensor([-2.0, 0.5, 3.0, 1.0]), torch.tensor([0, 1, 1, 0]))
        >>> metric.compute()
        tensor(0.7079, dtype=torch.float64)
    """


class ICI(CalibrationMetric[RankedSample], function=ici):
    """Streaming integrated calibration index (ICI); see `ici`. Stores all samples, or a sketch with `resolution`.

    Example:
        >>> import torch
        >>> metric = ICI(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9, 0.6, 0.3, 0.5]), torch.tensor([0, 1, 1, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.4000, dtype=torch.float64)
    """


class ATB(CalibrationMetric[RankedSample], function=atb):
    """Streaming averaged two-bin calibration error (ATB); see `atb`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> import torch
        >>> metric = ATB(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.0129, dtype=torch.float64)
    """


class Cox(CalibrationMetric[RankedSample], function=cox):
    """Streaming calibration slope or intercept from Cox's logistic regression; see `cox`.

    The state contains all samples, or a sketch if `resolution` is given. `fit()` returns all fields.

    Args:
        component: Field of `CoxCalibration` that `compute` returns.

    Example:
        >>> import torch
        >>> metric = Cox(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9, 0.6, 0.3, 0.5]), torch.tensor([0, 1, 1, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.9416, dtype=torch.float64)
    """

    def __init__(self, task: Task | None = None, **options: Any) -> None:
        super().__init__(task, **options)
        self.perfect = 1.0 if self.settings["component"] in ("slope", "p_value") else 0.0

    def fit(self) -> CoxCalibration:
        """Return all results of the regression, over all ranks if `torch.distributed` is running."""
        of_all = replace(self.estimator, component=None)  # type: ignore[call-arg]  # a `CoxEstimator`
        return CoxCalibration(*of_all.value(self._synced_statistic()).unbind(-1))


class Spiegelhalter(CalibrationMetric[Sums], function=spiegelhalter):
    """Streaming test of calibration by Spiegelhalter; see `spiegelhalter`. The state is 3 sums per class.

    Example:
        >>> import torch
        >>> metric = Spiegelhalter(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(-0.8296, dtype=torch.float64)
    """

    def __init__(self, task: Task | None = None, **options: Any) -> None:
        super().__init__(task, **options)
        if self.settings["component"] == "p_value":
            self.perfect, self.unit = 1.0, "probability"
