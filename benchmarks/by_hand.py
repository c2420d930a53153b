"""Alternatives to torchcalib that a person would write, in at most ten lines each.

The jobs of `everyday` compare them with our calls. Their names are those of the table. Functions get predictions and
labels. Only this file and `peers` import other packages, within each function.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as nn
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

from benchmarks.job import alternative

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]


def torch_monai_float32(q: Tensor, y: Tensor, n_bins: int = 15) -> Tensor:
    """Mean over images and channels as MONAI 1.6.1 computes it, with one-hot labels and float32 sums."""
    edges = torch.linspace(0, 1 + torch.finfo(torch.float32).eps, n_bins + 1)[1:]
    one_hot, found = nn.one_hot(y, q.shape[1]).movedim(-1, 1), []
    for p, t in zip(q.flatten(2).flatten(0, 1), one_hot.flatten(2).flatten(0, 1).float(), strict=True):
        index = torch.bucketize(p, edges).clamp(max=n_bins - 1)
        count, total, positives = (torch.zeros(n_bins).scatter_add_(0, index, x) for x in (torch.ones_like(p), p, t))
        found.append(((total - positives) / count.clamp(min=1)).abs() @ count / len(p))
    return torch.stack(found).mean()


def torch_binary_cross_entropy(p: Tensor, y: Tensor) -> Tensor:
    return nn.binary_cross_entropy(p, y.to(p.dtype))


def torch_binary_cross_entropy_with_logits(z: Tensor, y: Tensor) -> Tensor:
    return nn.binary_cross_entropy_with_logits(z, y.to(z.dtype))


def torch_mean_squared_error(p: Tensor, y: Tensor) -> Tensor:
    return ((p - y) ** 2).mean()


def torch_binary_ece(p: Tensor, y: Tensor, n_bins: int = 15) -> Tensor:
    index = (p * n_bins).long().clamp(max=n_bins - 1)
    gaps = torch.bincount(index, weights=p.double() - y.double(), minlength=n_bins)
    return gaps.abs().sum() / len(p)


def numpy_binary_ece(p: Floats, y: Ints, n_bins: int = 15) -> float:
    index = np.minimum((p * n_bins).astype(np.int64), n_bins - 1)
    gaps = np.bincount(index, weights=p - y, minlength=n_bins)
    return float(np.abs(gaps).sum() / len(p))


def numpy_mean_squared_error(p: Floats, y: Ints) -> float:
    return float(np.mean((p - y) ** 2))


@alternative("scikit-learn")
def sklearn_log_loss(p: Floats, y: Ints) -> float:
    from sklearn.metrics import log_loss

    return float(log_loss(y, p))


@alternative("scikit-learn")
def sklearn_brier_score(p: Sequence[float], y: Sequence[int]) -> float:
    from sklearn.metrics import brier_score_loss

    return float(brier_score_loss(y, p))


def numpy_ece(q: Floats, y: Ints, n_bins: int = 15) -> float:
    confidence, correct = q.max(-1), q.argmax(-1) == y
    index = np.minimum((confidence * n_bins).astype(np.int64), n_bins - 1)
    gaps = np.bincount(index, weights=confidence - correct, minlength=n_bins)
    return float(np.abs(gaps).sum() / len(y))


def torch_ece(logits: Tensor, y: Tensor) -> Tensor:
    confidence, top = logits.float().softmax(-1).max(-1)
    return torch_binary_ece(confidence, top == y)


def torch_ece_of_float64(logits: Tensor, y: Tensor) -> Tensor:
    confidence, top = logits.softmax(-1).max(-1)
    return torch_binary_ece(confidence, top == y)


def torch_ece_in_a_reused_buffer(logits: Tensor, y: Tensor, rows: int = 1024) -> Tensor:
    buffer, confidence, top = logits[:rows].clone(), logits[:, 0].clone(), y.clone()
    for k in range(0, len(logits), rows):
        part = logits[k : k + rows]
        q = torch.softmax(part, -1, out=buffer[: len(part)])
        torch.max(q, -1, out=(confidence[k : k + rows], top[k : k + rows]))
    return torch_binary_ece(confidence, top == y)


def torch_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return nn.cross_entropy(logits, y)


def torch_brier_score(logits: Tensor, y: Tensor) -> Tensor:
    q = logits.softmax(-1)
    return (q.square().sum(-1) - 2 * q.gather(-1, y.unsqueeze(-1)).squeeze(-1) + 1).mean()


def torch_four_scores(logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    log_q = logits.log_softmax(-1)
    confidence, top = log_q.exp().max(-1)
    of_label = log_q.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    brier = (log_q.exp().square().sum(-1) - 2 * of_label.exp() + 1).mean()
    ece = torch_binary_ece(confidence, top == y)
    return {"NLL": -of_label.mean(), "BrierScore": brier, "ECE": ece, "Accuracy": (top == y).float().mean()}


def torchmetrics_binary_ece(n_bins: int = 15) -> Metric:
    from torchmetrics.classification import BinaryCalibrationError

    return BinaryCalibrationError(n_bins)


def torchmetrics_ece(num_classes: int, n_bins: int = 15) -> Metric:
    from torchmetrics.classification import MulticlassCalibrationError

    return MulticlassCalibrationError(num_classes, n_bins)


def torch_loop_over_classes(logits: Tensor, y: Tensor) -> Tensor:
    q = logits.softmax(-1)
    return torch.stack([torch_binary_ece(q[:, k], y == k) for k in range(q.shape[-1])]).mean()


def torch_one_bincount_of_all_classes(logits: Tensor, y: Tensor, n_bins: int = 15) -> Tensor:
    q = logits.softmax(-1)
    cell = (q * n_bins).long().clamp_(max=n_bins - 1) + n_bins * torch.arange(q.shape[-1], device=q.device)
    gaps = torch.bincount(cell.flatten(), weights=q.double().flatten(), minlength=n_bins * q.shape[-1])
    gaps -= torch.bincount(cell.gather(-1, y.unsqueeze(-1)).squeeze(-1), minlength=len(gaps))
    return gaps.view(-1, n_bins).abs().sum(-1).mean() / len(q)


def torch_one_bincount_of_all_groups(p: Tensor, y: Tensor, groups: Tensor, n_bins: int = 15) -> Tensor:
    cell = groups * n_bins + (p * n_bins).long().clamp(max=n_bins - 1)
    gaps = torch.bincount(cell, weights=p.double() - y, minlength=n_bins * (int(groups.max()) + 1))
    return gaps.view(-1, n_bins).abs().sum(-1) / torch.bincount(groups)


def torch_loop_over_labels(q: Tensor, y: Tensor) -> Tensor:
    return torch.stack([torch_binary_ece(q[:, k], y[:, k]) for k in range(q.shape[-1])]).mean()


def torch_gradient_of_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(nn.cross_entropy(logits, y), logits)
    return gradient


def torch_gradient_of_ece_and_cross_entropy(logits: Tensor, y: Tensor, n_bins: int = 15) -> Tensor:
    confidence, top = logits.softmax(-1).max(-1)
    index = (confidence * n_bins).long().clamp(max=n_bins - 1)
    gaps = confidence.new_zeros(n_bins).index_add(0, index, confidence - (top == y).float())
    loss = gaps.abs().sum() / len(y) + nn.cross_entropy(logits, y)
    (gradient,) = torch.autograd.grad(loss, logits)
    return gradient


def torch_argsort_and_cumsum(p: Tensor, y: Tensor) -> Tensor:
    confidence = torch.maximum(p, 1 - p)
    wrong = ((p > 0.5) != y)[confidence.argsort(descending=True)]
    n = torch.arange(1, len(p) + 1, device=p.device)
    return (wrong.double().cumsum(0) / n).mean()


def torch_aurc(logits: Tensor, y: Tensor) -> Tensor:
    confidence, top = logits.softmax(-1).max(-1)
    wrong = (top != y)[confidence.argsort(descending=True)]
    return (wrong.double().cumsum(0) / torch.arange(1, len(y) + 1, device=y.device)).mean()


@alternative("scikit-learn")
def sklearn_roc_auc_score(p: Tensor, y: Tensor) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score((p > 0.5) == y, torch.maximum(p, 1 - p)))


def torch_topk_accuracy(p: Tensor, y: Tensor, coverage: float = 0.8) -> Tensor:
    confidence = torch.maximum(p, 1 - p)
    kept = confidence.topk(math.ceil(coverage * len(p))).indices
    return ((p[kept] > 0.5) == y[kept]).double().mean()


def torch_lbfgs_temperature(logits: Tensor, y: Tensor) -> float:
    log_scale = torch.zeros((), device=logits.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_scale], max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.cross_entropy(logits * log_scale.exp(), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    return (-log_scale).exp().item()


def numpy_bootstrap_of_brier_score(p: Tensor, y: Tensor, n_replicates: int = 1_000) -> Floats:
    scores, random = ((p - y) ** 2).numpy(), np.random.default_rng(0)
    values = [scores[random.integers(len(scores), size=len(scores))].mean() for _ in range(n_replicates)]
    return np.quantile(values, (0.025, 0.975))


@alternative("pandas", "scikit-learn")
def pandas_and_sklearn_report(path: Path, n_replicates: int = 1_000) -> dict[str, float]:
    """Evaluate a file, fit a temperature, and bootstrap the ECE."""
    import pandas as pd

    table = pd.read_csv(path)
    q, y = table.drop(columns="target").to_numpy(), table["target"].to_numpy()
    random = np.random.default_rng(0)
    rows = (random.integers(len(y), size=len(y)) for _ in range(n_replicates))
    low, high = np.quantile([numpy_ece(q[k], y[k]) for k in rows], (0.025, 0.975))
    temperature = torch_lbfgs_temperature(torch.tensor(np.log(q)), torch.tensor(y))
    brier = ((q - np.eye(q.shape[-1])[y]) ** 2).sum(-1).mean()
    values = {"ECE": numpy_ece(q, y), "NLL": sklearn_log_loss(q, y), "Brier": float(brier)}
    return values | {"low": float(low), "high": float(high), "temperature": temperature}
