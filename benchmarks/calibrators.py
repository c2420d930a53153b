"""Compare calibrators with those of probmetrics: `python -m benchmarks.calibrators`.

The systems are the recorded predictions in `$TORCHCALIB_DATA` (default `../shared/data`). Both sides get the same folds
and the same probabilities, rounded to float32, because probmetrics rounds them for some methods. The time is the
processor time of fit and prediction in all folds with one thread, after a first fit.

scikit-learn, and so cir-model, treats scores as equal that differ by less than 1e-15. This matters for the simulated
systems with large logits, where most probabilities are smaller.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import torchcalib as tc
from benchmarks import peers
from benchmarks.study import Part, Study, main
from benchmarks.tables import DATA

PEERS: dict[type[tc.Calibrator], str] = {
    tc.TemperatureScaling: "TemperatureScalingCalibrator",
    tc.EnsembleTemperatureScaling: "ets",
    tc.BetaCalibration: "beta",
    tc.QuadraticScaling: "quadratic-scaling",
    tc.VectorScaling: "VectorScalingCalibrator",
    tc.StructuredVectorScaling: "SVSCalibrator",
    tc.StructuredMatrixScaling: "SMSCalibrator",
    tc.IsotonicCalibration: "isotonic",
    tc.CentredIsotonicCalibration: "cir",
    tc.VennAbersCalibration: "ivap-ovr",
}
"""The name in probmetrics of each of our calibrators."""
KINDS = {kind.name: kind for kind in PEERS}

OF_CLASSES = (tc.VectorScaling, tc.StructuredVectorScaling, tc.StructuredMatrixScaling)
N_FOLDS = 5
MOST_PRODUCTS = 2**27  # largest N * C^2 for matrix scaling
LARGEST_RATIO, SLOWEST = 1.005, 1 / 3

Calibrate = Callable[[Tensor, Tensor, Tensor], Tensor]


@cache
def systems() -> dict[str, tuple[Path, str]]:
    """Return file and column by name, of each recorded system with samples of every class."""
    found = {}
    for path in sorted(DATA.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            columns = [name for name in arrays if arrays[name].dtype.kind == "f"]
        for column in columns:
            q, target = predictions(path, column)
            if (torch.bincount(target, minlength=q.shape[-1]) > 0).all():
                is_only = column in ("probs", "logits", "log_probs")
                found[path.stem if is_only else f"{path.stem} {column}"] = path, column
    return found


def predictions(path: Path, column: str) -> tuple[Tensor, Tensor]:
    """Return float64 probabilities `(N, C)` and labels."""
    with np.load(path, allow_pickle=False) as arrays:
        values = torch.from_numpy(arrays[column]).double()
        labels = f"y_{column.removeprefix('p_')}"
        target = torch.from_numpy(arrays[labels if labels in arrays else "targets"]).long()
    q = values.softmax(-1) if values.dim() == 2 else torch.stack((1 - values, values), -1)
    return q.float().double(), target


def cells() -> Iterator[tuple[str, str]]:
    """Yield each system with each method for its number of classes, but not the largest ones with matrix scaling."""
    for name, place in systems().items():
        n, n_classes = predictions(*place)[0].shape
        for kind in PEERS:
            is_large = kind is tc.StructuredMatrixScaling and n * n_classes**2 > MOST_PRODUCTS
            if (n_classes == 2 or "multiclass" in kind.tasks) and not is_large:
                yield name, kind.name


def ours(kind: type[tc.Calibrator], q: Tensor, target: Tensor, folds: Tensor) -> Tensor:
    options = {"calibrator": kind(), "folds": folds, "from_logits": False}
    if q.shape[-1] > 2 or kind in OF_CLASSES:
        return tc.cross_val_calibrate(q, target, task="multiclass", **options)
    p = tc.cross_val_calibrate(q[:, 1], target, task="binary", **options)
    return torch.stack((1 - p, p), -1)


def theirs(kind: str, q: Tensor, target: Tensor, folds: Tensor) -> Tensor:
    probs, labels, found = q.numpy(), target.numpy(), np.empty(q.shape)
    for k in range(N_FOLDS):
        inside = folds.numpy() == k
        calibrator = peers.probmetrics_calibrator(kind)
        calibrator.fit(probs[~inside], labels[~inside])
        found[inside] = calibrator.predict_proba(probs[inside])
    return torch.from_numpy(found)


def stratified_folds(target: Tensor) -> Tensor:
    """Return fold numbers: the samples of a class, in random order, are assigned to the folds in turn."""
    folds = torch.empty_like(target)
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
    for k in range(int(target.max()) + 1):
        members = order[target[order] == k]
        folds[members] = torch.arange(len(members)) % N_FOLDS
    return folds


def timed(calibrate: Calibrate, repeats: int, *data: Tensor) -> tuple[Tensor, float]:
    start = time.process_time()
    for _ in range(repeats):
        found = calibrate(*data)
    return found, (time.process_time() - start) / repeats


def scores(q: Tensor, target: Tensor) -> tuple[float, float]:
    """Return log loss, with probabilities clipped at the machine epsilon as in scikit-learn, and Brier score."""
    log_loss = -q.gather(-1, target.unsqueeze(-1)).clamp(min=torch.finfo(torch.float64).eps).log().mean()
    brier = (q - torch.nn.functional.one_hot(target, q.shape[-1])).square().sum(-1).mean()
    return log_loss.item(), brier.item()


def compared(system: str, calibrator: str, n_sets: int) -> list[str]:
    """Return the scores and times of both sides, and the goals that are missed."""
    kind, (q, target) = KINDS[calibrator], predictions(*systems()[system])
    folds = stratified_folds(target)
    sides: tuple[Calibrate, Calibrate] = partial(ours, kind), partial(theirs, PEERS[kind])
    if len(target) <= 10_000 and q.shape[-1] <= 10:  # imports and compiles
        for side in sides:
            side(q, target, folds)
    results = [timed(side, n_sets, q, target, folds) for side in sides]
    ((log_loss, brier), seconds), ((peer_loss, peer_brier), peer_seconds) = (
        (scores(found, target), elapsed) for found, elapsed in results
    )
    goals = {
        "log loss": log_loss <= LARGEST_RATIO * peer_loss,
        "Brier": brier <= LARGEST_RATIO * peer_brier,
        "time": seconds <= SLOWEST * peer_seconds,
    }
    return [
        *(f"{score:.5f}" for score in (log_loss, peer_loss, brier, peer_brier)),
        *(f"{1e3 * taken:.0f}" for taken in (seconds, peer_seconds)),
        f"{seconds / peer_seconds:.2f}",
        ", ".join(name for name, is_met in goals.items() if not is_met),
    ]


if __name__ == "__main__":
    # `--sets` repeats the fits, for their mean time.
    main(Study("calibrators", 1, [Part(list(cells()), compared)]))
