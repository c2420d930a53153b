"""Compare vector scaling and structured vector and matrix scaling with probmetrics, on recorded predictions.

    python -m benchmarks.structured                  all systems of $TORCHCALIB_DATA
    python -m benchmarks.structured cifar agnews     systems with "cifar" or "agnews" in their names
    python -m benchmarks.structured --simulated      over-confident logits of 1,000 classes as well

Both sides cross-validate with the same folds. The table shows the log loss and the Brier score of each side, and the
seconds of fits and predictions (the faster of two runs). Two-class systems are calibrated as multi-class predictions.
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchcalib.functional as F
from benchmarks import peers
from benchmarks.samples import overconfident_logits
from torchcalib.calibration import (
    Calibrator,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    VectorScaling,
    cross_val_calibrate,
)

GIVEN: dict[str, Any] = {"task": "multiclass", "from_logits": True}
PEERS: dict[str, type[Calibrator]] = {
    "VectorScalingCalibrator": VectorScaling,
    "SVSCalibrator": StructuredVectorScaling,
    "SMSCalibrator": StructuredMatrixScaling,
}
GOAL_SCORE = 1.005  # largest ratio of scores
GOAL_TIME = 1 / 3  # largest ratio of times


def systems(folder: Path) -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
    """Yield name, logits `(N, C)`, labels and recorded folds of every system in a folder."""
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            given = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        labels, folds = given.pop("targets", None), given.pop("fold_seed0", None)
        for name, values in given.items():
            if name.startswith("y_"):
                continue
            target = given["y_" + name[2:]] if labels is None else labels
            logits = values if values.dim() == 2 else torch.stack((torch.log1p(-values), values.log()), -1)
            yield f"{path.stem} {name}", logits, target.long(), folds


def split(target: Tensor, n_folds: int = 5) -> Tensor:
    """Return stratified fold numbers."""
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
    order = order[target[order].sort(stable=True).indices]
    return torch.empty_like(target).scatter_(0, order, torch.arange(len(target)) % n_folds)


def ours(kind: type[Calibrator], logits: Tensor, target: Tensor, folds: Tensor) -> Tensor:
    return cross_val_calibrate(logits, target, calibrator=kind(), folds=folds, **GIVEN)


def theirs(kind: str, logits: Tensor, target: Tensor, folds: Tensor) -> Tensor:
    calibrated = torch.empty_like(logits)
    for f in range(int(folds.max()) + 1):
        held_out = folds == f
        found = peers.probmetrics_scaling(kind, logits[~held_out], target[~held_out], logits[held_out])
        calibrated[held_out] = found.to(logits.dtype)
    return calibrated


def timed(call: Callable[[], Tensor], rounds: int) -> tuple[Tensor, float]:
    """Return the result, and the seconds of the fastest round."""
    best = torch.inf
    for _ in range(rounds):
        start = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - start)
    return result, best


def compare(name: str, logits: Tensor, target: Tensor, folds: Tensor, kinds: dict[str, type[Calibrator]]) -> None:
    """Print a line for each method."""
    for peer, kind in kinds.items():
        own, own_seconds = timed(lambda kind=kind: ours(kind, logits, target, folds), 2)  # type: ignore[misc]
        other, seconds = timed(lambda peer=peer: theirs(peer, logits, target, folds), 1 if own_seconds > 5 else 2)  # type: ignore[misc]
        scores = [[float(score(z, target, **GIVEN)) for z in (own, other)] for score in (F.nll, F.brier_score)]
        missed = [
            what
            for what, (mine, peers_score) in zip(("log loss", "Brier"), scores, strict=True)
            if mine > GOAL_SCORE * peers_score
        ]
        missed += ["time"] if own_seconds > GOAL_TIME * seconds else []
        columns = [f"{mine:8.5f} {peers_score:8.5f}" for mine, peers_score in scores]
        times = f"{own_seconds:8.3f} {seconds:8.3f} {own_seconds / seconds:6.3f}"
        verdict = f"missed: {', '.join(missed)}" if missed else "met"
        print(f"{name:32} {kind.name:26} {'  '.join(columns)}  {times}  {verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of systems; all systems by default")
    parser.add_argument("--simulated", action="store_true", help="also 20,000 samples of 1,000 classes")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # fits without an optimum are part of the comparison
    head = f"{'log loss: ours, peer':19} {'Brier: ours, peer':18}  {'seconds: ours, peer, ratio':25}"
    print(f"{'system':32} {'method':26} {head}")
    for name, logits, target, recorded in systems(Path(os.environ.get("TORCHCALIB_DATA", "../shared/data"))):
        if not chosen.names or any(part in name for part in chosen.names):
            compare(name, logits, target, split(target) if recorded is None else recorded.long(), PEERS)
    if chosen.simulated:
        logits, target = overconfident_logits(20_000, 1_000)
        without_matrix = {peer: kind for peer, kind in PEERS.items() if kind is not StructuredMatrixScaling}
        compare("20,000 x 1,000 simulated, 2 folds", logits, target, split(target, 2), without_matrix)


if __name__ == "__main__":
    main()
