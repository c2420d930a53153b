"""Calls of other packages for comparison. Only this file imports these packages.

`pip install '.[benchmarks]'` installs them. Each function imports its package, so that a missing package leaves out
only its own comparisons.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.job import alternative

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]


ONE_TEST_EACH = "authors' procedure: one scipy.stats.binomtest a prediction"


@alternative("scipy", title=ONE_TEST_EACH)
def one_test_per_prediction(_p: Tensor, _y: Tensor, blocks: tuple[Ints, Ints, Floats], alpha: float = 0.05) -> int:
    """Test-based calibration error (TCE) by its authors' procedure: one call of scipy's test per prediction."""
    from scipy.stats import binomtest

    rows = zip(*(column.tolist() for column in blocks), strict=True)
    return sum(binomtest(*row).pvalue <= alpha for row in rows)


@alternative("scikit-learn", title="sklearn calibration_curve(strategy='quantile')")
def quantile_calibration_curve(p: Tensor, y: Tensor, n_bins: int = 15) -> tuple[Floats, Floats]:
    """Mean outcome and mean prediction of the equal-mass bins of scikit-learn."""
    from sklearn.calibration import calibration_curve

    curve: tuple[Floats, Floats] = calibration_curve(y.numpy(), p.numpy(), n_bins=n_bins, strategy="quantile")
    return curve


@alternative("scikit-learn", title="sklearn IsotonicRegression.fit")
def isotonic_fit(p: Tensor, y: Tensor) -> object:
    """Isotonic fit of scikit-learn, without evaluating it at the predictions."""
    from sklearn.isotonic import IsotonicRegression

    return IsotonicRegression().fit(p.numpy(), y.numpy())


@alternative(title="numpy: argsort, cumsum")
def plain_ks(p: Tensor, y: Tensor) -> float:
    """Kolmogorov-Smirnov calibration error in plain numpy."""
    scores, labels = p.numpy(), y.numpy()
    order = scores.argsort()
    return float(np.abs((labels[order] - scores[order]).cumsum()).max() / len(p))


@alternative("scikit-learn", title="sklearn LogisticRegression")
def logistic_fit(p: Tensor, y: Tensor) -> object:
    """Unpenalised logistic regression of scikit-learn on the log-odds."""
    from sklearn.linear_model import LogisticRegression

    q = p.numpy().clip(1e-12, 1 - 1e-12)
    return LogisticRegression(C=np.inf).fit(np.log(q / (1 - q)).reshape(-1, 1), y.numpy())


@alternative("probmetrics", title="probmetrics TemperatureScalingCalibrator")
def temperature_by_bisection(logits: Tensor, target: Tensor) -> float:
    """Inverse temperature by probmetrics: 30 bisections of its logarithm in the precision of the logits."""
    from probmetrics.calibrators import TemperatureScalingCalibrator
    from probmetrics.distributions import CategoricalLogits

    return float(TemperatureScalingCalibrator().fit_torch(CategoricalLogits(logits), target).invtemp_)


@alternative(title="torch.optim.LBFGS(lr=0.01, max_iter=50), as Guo et al. run it")
def temperature_by_lbfgs(logits: Tensor, target: Tensor) -> float:
    """Temperature by the code of Guo et al. (ICML 2017), gpleiss/temperature_scaling.

    torch-uncertainty does the same for the inverse temperature, with lr=0.1 and max_iter=100.
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


@alternative("psrcal", title="psrcal AffineCalLogLoss, float64 (scipy L-BFGS-B, 100 iterations)")
def affine_fit(_: Tensor, target: Tensor, log_q: Tensor) -> Tensor:
    """Class biases by psrcal (from the authors of [EPSR]), fitted with a scale. It may stop before the optimum."""
    from psrcal.calibration import AffineCalLogLoss

    model = AffineCalLogLoss(log_q, target)
    model.train()
    bias: Tensor = model.bias.detach()
    return bias


def probmetrics_calibrator(kind: str) -> Any:
    """Calibrator of probmetrics by name or class name. Its `fit` and `predict_proba` get probabilities `(N, C)`.

    "beta" calls betacal, "isotonic" scikit-learn, "cir" cir-model and "ivap-ovr" venn-abers. "ets" minimises the log
    loss.
    """
    from probmetrics import calibrators

    if kind == "ets":
        return calibrators.ETSCalibrator(loss="ce")
    by_class = getattr(calibrators, kind, None)
    return calibrators.get_calibrator(kind) if by_class is None else by_class()


@alternative(title="torch: softmax @ cost, argmin, gather")
def plain_bayes_risk(logits: Tensor, target: Tensor, _: object, cost: Tensor) -> Tensor:
    """Mean cost of the decisions with the lowest expected cost, in plain torch."""
    return cost[target, (logits.softmax(-1) @ cost).argmin(-1)].mean()


@alternative(title="torch: the matrix of all pairs")
def skce_at_once(logits: Tensor, target: Tensor) -> Tensor:
    """Unbiased squared kernel calibration error (SKCE) from the matrix of all pairs, in plain torch."""
    q = logits.softmax(-1)
    residual = torch.nn.functional.one_hot(target, q.shape[-1]) - q
    h = (residual @ residual.T) * (-torch.cdist(q, q, p=1) / 2).exp()
    n = len(h)
    return (h.sum() - h.trace()) / (n * (n - 1))


@alternative(title="torch: the matrix of all pairs")
def dirichlet_error_at_once(logits: Tensor, target: Tensor, bandwidth: float) -> Tensor:
    """Canonical calibration error from the matrix of all pairs, as computed by its authors."""
    q = logits.softmax(-1)
    alpha = q / bandwidth + 1
    log_kernel = (alpha - 1) @ (q + 1e-10).log().T + (alpha.sum(-1).lgamma() - alpha.lgamma().sum(-1)).unsqueeze(-1)
    weights = log_kernel.fill_diagonal_(-torch.inf).softmax(0)
    expected = weights.T @ torch.nn.functional.one_hot(target, q.shape[-1]).to(q)
    return (expected - q).abs().sum(-1).mean()


@alternative(title="torch: softmax, topk, bincount")
def top_k_ece(logits: Tensor, target: Tensor, k: int, n_bins: int) -> Tensor:
    """Top-k ECE with softmax, `torch.topk` and `bincount`."""
    top = logits.softmax(-1).topk(k, -1)
    confidence = top.values.sum(-1).clamp(max=1)
    outcome = (top.indices == target.unsqueeze(-1)).any(-1)
    index = (confidence * n_bins).long().clamp(max=n_bins - 1)
    sums = [torch.bincount(index, weights=x.double(), minlength=n_bins) for x in (confidence, outcome)]
    return (sums[1] - sums[0]).abs().sum() / len(target)


@alternative(title="torch.softmax into a reused buffer, 1,024 rows at a time")
def softmax_in_chunks(logits: Tensor, _target: Tensor | None = None, rows: int = 1024) -> Tensor:
    """Softmax of chunks that fit into the cache, into one buffer, which does not depend on the allocator of torch.

    Returns:
        The probabilities of the last chunk.
    """
    buffer = logits.new_empty(rows, logits.shape[-1])
    chunks = logits.split(rows)
    for chunk in chunks:
        torch.softmax(chunk, -1, out=buffer[: len(chunk)])
    return buffer[: len(chunks[-1])]


@alternative(title="torchmetrics functional calibration error")
def torchmetrics_ece(logits: Tensor, target: Tensor, n_bins: int = 15, **options: Any) -> Tensor:
    """ECE of torchmetrics, which applies a softmax to values outside [0, 1]."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    return multiclass_calibration_error(logits, target, num_classes=logits.shape[-1], n_bins=n_bins, **options)


@alternative(title="torchmetrics functional calibration error")
def torchmetrics_binary_ece(preds: Tensor, target: Tensor, n_bins: int = 15, **options: Any) -> Tensor:
    """Binary ECE of torchmetrics, with float32 sums."""
    from torchmetrics.functional.classification import binary_calibration_error

    return binary_calibration_error(preds, target, n_bins=n_bins, **options)


@alternative("probmetrics", "numba", title="probmetrics log loss + Brier + ECE + accuracy")
def probmetrics_values(logits: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Log loss, Brier score, ECE in 15 bins and accuracy of probmetrics."""
    from probmetrics.metrics import Metrics

    metrics = Metrics.from_names(["logloss", "brier", "ece-15", "accuracy"])
    values: dict[str, Tensor] = metrics.compute_all_from_labels_logits(target, logits)
    return values


@alternative("relplot", title="relplot binnedECE")
def relplot_ece(p: Tensor, y: Tensor, n_bins: int = 15) -> float:
    """Binned ECE of relplot, the fastest alternative for two classes."""
    from relplot.metrics import binnedECE

    return float(binnedECE(p.numpy(), y.numpy(), nbins=n_bins))


@alternative("relplot", title="relplot smECE")
def relplot_smece(p: Tensor, y: Tensor) -> float:
    """Smooth ECE of relplot, the package of its authors."""
    from relplot.metrics import smECE

    return float(smECE(p.numpy(), y.numpy()))


def rows_until_alarm(p: Tensor, y: Tensor, look: int) -> int:
    """Return the number of rows until an alarm at 5% of the monitor of probcal, or all rows without one.

    The monitor bets on shift and slope, which it fits to all earlier rows before each look, and on four fixed shifts.
    """
    from probcal.monitor import CalibrationMonitor

    monitor, probs, outcomes = CalibrationMonitor(alpha=0.05), p.numpy(), y.numpy()
    for end in range(look, len(p) + 1, look):
        if monitor.update(outcomes[end - look : end], probs[end - look : end]).alarm:
            return end
    return len(p)
