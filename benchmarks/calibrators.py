"""Compare calibrators with those of probmetrics on recorded predictions, and print tables.

    python -m benchmarks.calibrators [folder]

The folder contains the recorded predictions; the default is `$TORCHCALIB_DATA`, or else `../shared/data`. A row has the
log loss and the Brier score, cross-validated in the same 5 folds. It also has the processor time of all fits and
predictions, the shortest of 3 runs in turn. Both sides get probabilities.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import peers
from torchcalib.calibration import (
    BetaCalibration,
    Calibrator,
    EnsembleTemperatureScaling,
    QuadraticScaling,
    cross_val_calibrate,
)

PAIRS = ((BetaCalibration, "beta"), (QuadraticScaling, "quadratic-scaling"), (EnsembleTemperatureScaling, "ets"))
N_FOLDS, ROUNDS = 5, 3

System = tuple[str, Tensor, Tensor]
Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


def systems(folder: Path) -> Iterator[System]:
    """Yield name, float64 probabilities `(N, C)` and labels of each recorded system with samples of every class."""
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            content = {name: torch.from_numpy(arrays[name]) for name in arrays}
        for name, values in content.items():
            if not values.is_floating_point():
                continue
            target = content.get(f"y_{name.removeprefix('p_')}", content.get("targets")).long()
            values = values.double()
            q = values.softmax(-1) if values.dim() == 2 else torch.stack((1 - values, values), -1)
            if (torch.bincount(target, minlength=q.shape[-1]) > 0).all():
                yield (path.stem if name in ("probs", "logits", "log_probs") else f"{path.stem} {name}"), q, target


def ours(kind: type[Calibrator], q: Tensor, target: Tensor, folds: Tensor) -> Tensor:
    """Fit all folds in one batch."""
    options = {"calibrator": kind(), "folds": folds, "from_logits": False}
    if q.shape[-1] > 2:
        return cross_val_calibrate(q, target, task="multiclass", **options)
    p = cross_val_calibrate(q[:, 1], target, task="binary", **options)
    return torch.stack((1 - p, p), -1)


def theirs(kind: str, q: Tensor, target: Tensor, folds: Tensor) -> Tensor:
    probs, labels, found = q.numpy(), target.numpy(), np.empty_like(q.numpy())
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


def timed(predict: Predict, *data: Tensor) -> tuple[Tensor, float]:
    start = time.process_time()
    found = predict(*data)
    return found, time.process_time() - start


def scores(q: Tensor, target: Tensor) -> tuple[float, float]:
    log_loss = -q.gather(-1, target.unsqueeze(-1)).log().mean()
    brier = (q - torch.nn.functional.one_hot(target, q.shape[-1])).square().sum(-1).mean()
    return log_loss.item(), brier.item()


def row(kind: type[Calibrator], peer: str, system: System) -> str:
    name, q, target = system
    folds = stratified_folds(target)
    sides = partial(ours, kind), partial(theirs, peer)
    times: tuple[list[float], list[float]] = ([], [])
    values = []
    for _ in range(ROUNDS):
        results = [timed(side, q, target, folds) for side in sides]
        values = [scores(found, target) for found, _ in results]
        for side, (_, seconds) in zip(times, results, strict=True):
            side.append(seconds)
    (log_loss, brier), (other_log_loss, other_brier) = values
    seconds, other_seconds = map(min, times)
    missed = [
        what
        for what, is_missed in (
            ("log loss", not log_loss <= 1.005 * other_log_loss),
            ("Brier", not brier <= 1.005 * other_brier),
            ("time", seconds > other_seconds / 3),
        )
        if is_missed
    ]
    return (
        f"| {name} | {log_loss:.5f} | {other_log_loss:.5f} | {brier:.5f} | {other_brier:.5f} | {1e3 * seconds:.1f} | "
        f"{1e3 * other_seconds:.1f} | {seconds / other_seconds:.2f} | {', '.join(missed)} |"
    )


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("TORCHCALIB_DATA", "../shared/data"))
    warnings.simplefilter("ignore")
    recorded = list(systems(folder))
    for kind, peer in PAIRS:
        print(f"\n{kind.name}: torchcalib / probmetrics {peer!r}\n")
        print("| system | log loss | theirs | Brier | theirs | ms | theirs | ratio | missed |")
        print("|---|---|---|---|---|---|---|---|---|")
        for system in recorded:
            if system[1].shape[-1] == 2 or "multiclass" in kind.tasks:
                print(row(kind, peer, system), flush=True)


if __name__ == "__main__":
    main()
