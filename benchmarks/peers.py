"""What our results are held against. The only file that imports competitors.

`pip install '.[benchmarks]'` installs them. Each is imported where it is called: a peer names what it needs, and is
left out, by name, where that is missing.
"""

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import Metric

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]


def one_test_per_prediction(p: Floats, positives: Ints, n: Ints, alpha: float = 0.05) -> int:
    """The procedure of the authors of TCE: one call of scipy's test for each prediction, against its block."""
    from scipy.stats import binomtest

    rows = zip(positives.tolist(), n.tolist(), p.tolist(), strict=True)
    return sum(binomtest(k, size, value).pvalue <= alpha for k, size, value in rows)


def quantile_calibration_curve(y: Ints, p: Floats, n_bins: int) -> tuple[Floats, Floats]:
    """Equal-mass bins of scikit-learn: mean outcome and mean prediction of each."""
    from sklearn.calibration import calibration_curve

    curve: tuple[Floats, Floats] = calibration_curve(y, p, n_bins=n_bins, strategy="quantile")
    return curve


def isotonic_fit(y: Ints, p: Floats) -> object:
    """Isotonic fit of scikit-learn; its values at the predictions are not asked for."""
    from sklearn.isotonic import IsotonicRegression

    return IsotonicRegression().fit(p, y)


def temperature_by_bisection(logits: Tensor, target: Tensor) -> float:
    """The fit of probmetrics, 30 bisections of log alpha in the precision of the logits: alpha."""
    from probmetrics.calibrators import TemperatureScalingCalibrator
    from probmetrics.distributions import CategoricalLogits

    return float(TemperatureScalingCalibrator().fit_torch(CategoricalLogits(logits), target).invtemp_)


def temperature_by_lbfgs(logits: Tensor, target: Tensor) -> float:
    """The fit that most code copies, from gpleiss/temperature_scaling of Guo et al. (ICML 2017): the temperature.

    torch-uncertainty does the same on the inverse temperature, with other steps (lr=0.1, max_iter=100).
    """
    temperature = torch.nn.Parameter(torch.full((1,), 1.5))
    optimizer = torch.optim.LBFGS([temperature], lr=0.01, max_iter=50)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(logits / temperature, target)
        loss.backward()
        return loss

    optimizer.step(closure)
    return temperature.item()


def affine_fit(log_q: Tensor, target: Tensor) -> Tensor:
    """The fit of psrcal, by the authors of EPSR: the biases of the classes. It may stop before its optimum."""
    from psrcal.calibration import AffineCalLogLoss

    model = AffineCalLogLoss(log_q, target)
    model.train()
    bias: Tensor = model.bias.detach()
    return bias


def plain_bayes_risk(logits: Tensor, target: Tensor, cost: Tensor) -> Tensor:
    """Mean cost of the decisions of least expected cost, in the shortest torch."""
    return cost[target, (logits.softmax(-1) @ cost).argmin(-1)].mean()


def skce_at_once(logits: Tensor, target: Tensor) -> Tensor:
    """The unbiased estimate from the matrix of all pairs, in the shortest torch."""
    q = logits.softmax(-1)
    residual = torch.nn.functional.one_hot(target, q.shape[-1]) - q
    h = (residual @ residual.T) * (-torch.cdist(q, q, p=1) / 2).exp()
    n = len(h)
    return (h.sum() - h.trace()) / (n * (n - 1))


def dirichlet_error_at_once(logits: Tensor, target: Tensor, bandwidth: float) -> Tensor:
    """The canonical error from the matrix of all pairs, as its authors compute it."""
    q = logits.softmax(-1)
    alpha = q / bandwidth + 1
    log_kernel = (alpha - 1) @ (q + 1e-10).log().T + (alpha.sum(-1).lgamma() - alpha.lgamma().sum(-1)).unsqueeze(-1)
    weights = log_kernel.fill_diagonal_(-torch.inf).softmax(0)
    expected = weights.T @ torch.nn.functional.one_hot(target, q.shape[-1]).to(q)
    return (expected - q).abs().sum(-1).mean()


def top_k_ece(logits: Tensor, target: Tensor, k: int, n_bins: int) -> Tensor:
    """Softmax, `torch.topk` and three `bincount`s."""
    top = logits.softmax(-1).topk(k, -1)
    confidence = top.values.sum(-1).clamp(max=1)
    outcome = (top.indices == target.unsqueeze(-1)).any(-1)
    index = (confidence * n_bins).long().clamp(max=n_bins - 1)
    sums = [torch.bincount(index, weights=x.double(), minlength=n_bins) for x in (confidence, outcome)]
    return (sums[1] - sums[0]).abs().sum() / len(target)


def logsumexp_in_chunks(logits: Tensor, rows: int = 1024) -> Tensor:
    """One read of the logits at the speed of torch: what the chunks need stays in the cache and is used again."""
    result = logits.new_empty(len(logits))
    for begin in range(0, len(logits), rows):
        torch.logsumexp(logits[begin : begin + rows], -1, out=result[begin : begin + rows])
    return result


def torchmetrics_ece(logits: Tensor, target: Tensor, n_bins: int, **options: Any) -> Tensor:
    """The functional form, which takes a softmax where it sees values outside [0, 1]."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    return multiclass_calibration_error(logits, target, num_classes=logits.shape[-1], n_bins=n_bins, **options)


def torchmetrics_stream(num_classes: int, n_bins: int) -> Metric:
    """The class, which keeps the confidence and the outcome of every sample."""
    from torchmetrics.classification import MulticlassCalibrationError

    with warnings.catch_warnings(action="ignore"):  # that it will need much memory
        return MulticlassCalibrationError(num_classes=num_classes, n_bins=n_bins)


def torchmetrics_binary_ece(preds: Tensor, target: Tensor, n_bins: int) -> Tensor:
    """The functional form; its sums are float32."""
    from torchmetrics.functional.classification import binary_calibration_error

    return binary_calibration_error(preds, target, n_bins=n_bins)


def probmetrics_values(logits: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Log loss, Brier score, ECE in 15 bins and accuracy."""
    from probmetrics.metrics import Metrics

    metrics = Metrics.from_names(["logloss", "brier", "ece-15", "accuracy"])
    values: dict[str, Tensor] = metrics.compute_all_from_labels_logits(target, logits)
    return values


def relplot_ece(p: Floats, y: Ints, n_bins: int) -> float:
    """The binned ECE of relplot, the fastest that there was for two classes."""
    from relplot.metrics import binnedECE

    return float(binnedECE(p, y, nbins=n_bins))


def relplot_smece(p: Floats, y: Ints) -> float:
    """The smooth ECE of relplot, by its authors."""
    from relplot.metrics import smECE

    return float(smECE(p, y))


def cross_entropy_with_gradient(logits: Tensor, target: Tensor) -> Tensor | None:
    """Forward and backward of the loss that every network is trained with."""
    logits.grad = None
    cross_entropy(logits, target).backward()
    return logits.grad
