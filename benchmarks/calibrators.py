"""Compare calibrators with those of probmetrics: `python -m benchmarks.calibrators` writes results/calibrators.md.

    python -m benchmarks.calibrators cifar10 sst2   systems whose name contains a word; prints only

The systems are the recorded predictions in `$TORCHCALIB_DATA` (default `../shared/data`). Both sides get the same folds
and the same probabilities, rounded to float32, because probmetrics rounds them for some methods. The time is the
processor time of fit and prediction in all folds with one thread, after a first fit.

scikit-learn, and so cir-model, treats scores as equal that differ by less than 1e-15. This matters for the simulated
systems with large logits, where most probabilities are smaller.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.tables import DATA
from torchcalib.calibration import (
    BetaCalibration,
    Calibrator,
    CentredIsotonicCalibration,
    EnsembleTemperatureScaling,
    IsotonicCalibration,
    QuadraticScaling,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    TemperatureScaling,
    VectorScaling,
    VennAbersCalibration,
    cross_val_calibrate,
)

METHODS: dict[str, type[Calibrator]] = {
    "TemperatureScalingCalibrator": TemperatureScaling,
    "ets": EnsembleTemperatureScaling,
    "beta": BetaCalibration,
    "quadratic-scaling": QuadraticScaling,
    "VectorScalingCalibrator": VectorScaling,
    "SVSCalibrator": StructuredVectorScaling,
    "SMSCalibrator": StructuredMatrixScaling,
    "isotonic": IsotonicCalibration,
    "cir": CentredIsotonicCalibration,
    "ivap-ovr": VennAbersCalibration,
}
"""Our calibrator for each one of probmetrics."""

OF_CLASSES = (VectorScaling, StructuredVectorScaling, StructuredMatrixScaling)
N_FOLDS = 5
MOST_PRODUCTS = 2**27  # largest N * C^2 for matrix scaling
LARGEST_RATIO, SLOWEST = 1.005, 1 / 3
PAGE = Path(__file__).resolve().parent / "results" / "calibrators.md"

Calibrate = Callable[[Tensor, Tensor, Tensor], Tensor]


def systems() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, float64 probabilities `(N, C)` and labels of each recorded system with samples of every class."""
    for path in sorted(DATA.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            content = {name: torch.from_numpy(arrays[name]) for name in arrays}
        for name, values in content.items():
            if not values.is_floating_point():
                continue
            target = content.get(f"y_{name.removeprefix('p_')}", content.get("targets")).long()
            values = values.double()
            q = values.softmax(-1) if values.dim() == 2 else torch.stack((1 - values, values), -1)
            if (torch.bincount(target, minlength=q.shape[-1]) > 0).all():
                shown = path.stem if name in ("probs", "logits", "log_probs") else f"{path.stem} {name}"
                yield shown, q.float().double(), target


def ours(kind: type[Calibrator], q: Tensor, target: Tensor, folds: Tensor) -> Tensor:
    options = {"calibrator": kind(), "folds": folds, "from_logits": False}
    if q.shape[-1] > 2 or kind in OF_CLASSES:
        return cross_val_calibrate(q, target, task="multiclass", **options)
    p = cross_val_calibrate(q[:, 1], target, task="binary", **options)
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


def timed(calibrate: Calibrate, *data: Tensor) -> tuple[Tensor, float]:
    start = time.process_time()
    found = calibrate(*data)
    return found, time.process_time() - start


def scores(q: Tensor, target: Tensor) -> tuple[float, float]:
    """Return log loss, with probabilities clipped at the machine epsilon as in scikit-learn, and Brier score."""
    log_loss = -q.gather(-1, target.unsqueeze(-1)).clamp(min=torch.finfo(torch.float64).eps).log().mean()
    brier = (q - torch.nn.functional.one_hot(target, q.shape[-1])).square().sum(-1).mean()
    return log_loss.item(), brier.item()


def row(system: str, peer: str, kind: type[Calibrator], q: Tensor, target: Tensor) -> str:
    """Return a row of the table, with the goals that are missed."""
    folds = stratified_folds(target)
    sides: tuple[Calibrate, Calibrate] = partial(ours, kind), partial(theirs, peer)
    if len(target) <= 10_000 and q.shape[-1] <= 10:  # imports and compiles
        for side in sides:
            side(q, target, folds)
    results = [timed(side, q, target, folds) for side in sides]
    ((log_loss, brier), seconds), ((peer_loss, peer_brier), peer_seconds) = (
        (scores(found, target), elapsed) for found, elapsed in results
    )
    goals = {
        "log loss": log_loss <= LARGEST_RATIO * peer_loss,
        "Brier": brier <= LARGEST_RATIO * peer_brier,
        "time": seconds <= SLOWEST * peer_seconds,
    }
    missed = ", ".join(name for name, is_met in goals.items() if not is_met)
    return (
        f"| {system} | {kind.name} | {log_loss:.5f} | {peer_loss:.5f} | {brier:.5f} | {peer_brier:.5f} | "
        f"{1e3 * seconds:.0f} | {1e3 * peer_seconds:.0f} | {seconds / peer_seconds:.2f} | {missed} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of names of systems")
    words = parser.parse_args().words
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = [
        "# Calibrators and those of probmetrics",
        "",
        "Cross-validated log loss and Brier score in the same five folds, and milliseconds of processor time of all "
        "fits and predictions with one thread. Goals: scores at most 0.5% larger, a third of the time. "
        "Computed by `python -m benchmarks.calibrators`.",
        "",
        "| system | calibrator | log loss | theirs | Brier | theirs | ms | theirs | ratio | missed |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    print("\n".join(lines[-2:]))
    for name, q, target in systems():
        if words and not any(word in name for word in words):
            continue
        for peer, kind in METHODS.items():
            is_large = kind is StructuredMatrixScaling and len(q) * q.shape[-1] ** 2 > MOST_PRODUCTS
            if (q.shape[-1] > 2 and "multiclass" not in kind.tasks) or is_large:
                continue
            lines.append(row(name, peer, kind, q, target))
            print(lines[-1], flush=True)
    if not words:
        PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
