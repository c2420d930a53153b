"""Cost of calibrators for calibrated models: `python -m benchmarks.calibrated`.

Labels are drawn from the probabilities of the model. A calibrator that is fitted to them can only do harm. Its excess
is the mean of |f(q) - q|^2 on new predictions q: the expected change of the Brier score, without noise of labels. The
lost accuracy is the mean of max q - q_k for the top class k after calibration.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import torchcalib as tc
from benchmarks.study import Found, Part, Row, Study, main
from torchcalib.calibration.recommendation import CALIBRATORS, ON_REQUEST

MANY_PARAMETERS = (tc.HistogramBinning, tc.BayesianBinning, tc.StructuredMatrixScaling, tc.DirichletCalibration)
"""Binning methods and full matrices, which pay for their parameters."""
MOST, MOST_OF_MANY = 1.0, 3.5
"""Goals of the excess in units of that of isotonic calibration."""

Generator = np.random.Generator


class Cell(NamedTuple):
    """A distribution of predictions of a calibrated model."""

    label: str
    n_classes: int
    n: int
    n_sets: int
    draw: Callable[[Generator, tuple[int, ...]], Any]  # probabilities of the given shape, with classes if more than two
    dtype: torch.dtype = torch.float64
    weighted: bool = False  # weights 0, 1, 2 and 3 instead of none


def beta(a: float, b: float) -> Callable[[Generator, tuple[int, ...]], Any]:
    return lambda g, shape: g.beta(a, b, shape)


def softmax(scale: float, n_classes: int, spread: float = 0.0) -> Callable[[Generator, tuple[int, ...]], Any]:
    """Return softmax of normal logits with a standard deviation, and class means from 0 to -`spread`."""

    def draw(g: Generator, shape: tuple[int, ...]) -> Any:
        z = scale * g.standard_normal((*shape, n_classes)) - np.linspace(0, spread, n_classes)
        q = np.exp(z - z.max(-1, keepdims=True))
        return q / q.sum(-1, keepdims=True)

    return draw


CELLS = (
    Cell("beta(0.1, 0.9)", 2, 2_000, 1_000, beta(0.1, 0.9)),
    Cell("beta(0.7, 0.7)", 2, 2_000, 1_000, beta(0.7, 0.7)),
    Cell("beta(4, 4)", 2, 2_000, 1_000, beta(4, 4)),
    Cell("rare, beta(0.5, 20)", 2, 2_000, 1_000, beta(0.5, 20)),
    Cell("beta(0.7, 0.7), float32, weights", 2, 2_000, 1_000, beta(0.7, 0.7), torch.float32, True),
    Cell("logits N(0, 1)", 10, 2_000, 100, softmax(1, 10)),
    Cell("logits N(0, 4^2)", 10, 2_000, 100, softmax(4, 10)),
    Cell("logits N(0, 2^2), rare classes", 10, 2_000, 100, softmax(2, 10, 5)),
    Cell("logits N(0, 1)", 100, 3_000, 4, softmax(1, 100)),
    Cell("logits N(0, 4^2)", 100, 3_000, 4, softmax(4, 100)),
)
N_NEW, AT_ONCE = {2: 1_000, 10: 1_000, 100: 1_000}, {2: 100, 10: 10, 100: 1}


class Cost(NamedTuple):
    """Excess of the Brier score and lost accuracy of each data set, and the number of probabilities of exactly 0."""

    excess: Tensor
    lost: Tensor
    n_zeros: int


def labels_of(g: Generator, q: Any, n_classes: int) -> Any:
    """Return labels drawn from probabilities."""
    if n_classes == 2:
        return (g.random(q.shape) < q).astype(np.int64)
    return (g.random(q.shape[:-1])[..., None] > q.cumsum(-1)).sum(-1).clip(0, n_classes - 1)


def costs(cell: Cell, kinds: list[type[tc.Calibrator]], n_sets: int, seed: int = 0) -> dict[type[tc.Calibrator], Cost]:
    """Return the costs of calibrators on the same data sets."""
    g, found = np.random.default_rng(seed), {kind: list[Cost]() for kind in kinds}
    task = "binary" if cell.n_classes == 2 else "multiclass"
    for start in range(0, n_sets, AT_ONCE[cell.n_classes]):
        size = min(AT_ONCE[cell.n_classes], n_sets - start)
        q = cell.draw(g, (size, cell.n))
        target = torch.from_numpy(labels_of(g, q, cell.n_classes))
        new = torch.from_numpy(cell.draw(g, (size, N_NEW[cell.n_classes]))).to(cell.dtype)
        weights = torch.from_numpy(g.integers(0, 4, (size, cell.n))) if cell.weighted else None
        options = {"batch_dims": 1, "from_logits": False, "weights": weights}
        for kind in kinds:
            f = kind().fit(torch.from_numpy(q).to(cell.dtype), target, task, **options)(new)
            found[kind].append(_cost(f, new, cell.n_classes == 2))
    return {
        kind: Cost(torch.cat([c.excess for c in of]), torch.cat([c.lost for c in of]), sum(c.n_zeros for c in of))
        for kind, of in found.items()
    }


def _cost(f: Tensor, q: Tensor, is_binary: bool) -> Cost:
    """Return the cost of calibrated probabilities f for probabilities q."""
    f, q = f.double(), q.double()
    if is_binary:
        f, q = torch.stack((1 - f, f), -1), torch.stack((1 - q, q), -1)
        excess = (f - q)[..., 1].square()
    else:
        excess = (f - q).square().sum(-1)
    lost = q.amax(-1) - q.gather(-1, f.argmax(-1, keepdim=True)).squeeze(-1)
    return Cost(excess.mean(-1), lost.mean(-1), int(((f == 0) & (q > 0)).sum()))


def methods(cell: Cell) -> list[type[tc.Calibrator]]:
    """Return the calibrators for a cell, isotonic calibration first."""
    task = "binary" if cell.n_classes == 2 else "multiclass"
    rest = [kind for kind in (*CALIBRATORS, *ON_REQUEST) if task in kind.tasks and kind is not tc.IsotonicCalibration]
    return [tc.IsotonicCalibration, *rest]


def means(label: str, n_classes: int, n_sets: int) -> dict[str, list[float]]:
    """Return excess, its standard error, lost accuracy and number of zeros by the name of a calibrator."""
    cell = next(cell for cell in CELLS if (cell.label, cell.n_classes) == (label, n_classes))
    return {
        kind.name: [
            *(float(x) for x in (cost.excess.mean(), cost.excess.std() / math.sqrt(n_sets), cost.lost.mean())),
            cost.n_zeros,
        ]
        for kind, cost in costs(cell, methods(cell), n_sets).items()
    }


def table(found: dict[tuple[str, int], Found]) -> Iterator[list[Row]]:
    rows = list[Row]()
    of_many = {kind.name for kind in MANY_PARAMETERS}
    for (label, n_classes), (n_sets, of_cell) in found.items():
        isotonic = of_cell[tc.IsotonicCalibration.name][0]
        for name, (excess, error, lost, n_zeros) in of_cell.items():
            goal = MOST_OF_MANY if name in of_many else MOST
            missed = f"excess above {goal:g}" if excess > goal * isotonic else ""
            numbers = f"{1e4 * excess:.3g} ({1e4 * error:.2g})", f"{excess / isotonic:.2f}", f"{1e4 * lost:.2g}"
            rows.append((n_classes, label, n_sets, name, *numbers, str(n_zeros), missed))
    yield rows


SHARES = {(cell.label, cell.n_classes): cell.n_sets / 1_000 for cell in CELLS}
STUDY = Study("calibrated", 1_000, [Part(list(SHARES), means, table, SHARES.__getitem__)])

if __name__ == "__main__":
    main(STUDY)
