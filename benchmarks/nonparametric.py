"""Compare calibrators of single probabilities with probmetrics, by 5-fold cross-validation on real and simulated data.

    python -m benchmarks.nonparametric                     all systems and methods
    python -m benchmarks.nonparametric cifar10 --rounds 3  systems whose name contains a word; the fastest of 3 rounds

The systems are in $TORCHCALIB_DATA (or ../shared/data). Both sides get the same folds and the same probabilities,
rounded to float32, because probmetrics rounds them; `--exact` passes float64 probabilities to both. The time is the CPU
time of fit and prediction in all folds, without the first fit of the process. The log loss clips probabilities at the
machine epsilon of float64, because isotonic methods return 0.

scikit-learn, and so cir-model, also treat scores as equal that differ by less than 1e-15 (float32: 1e-6). This matters
for the simulated systems with large logits, where most probabilities are smaller.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.peers import Floats, Ints, probmetrics_calibrated
from benchmarks.tables import DATA
from torchcalib.calibration import CentredIsotonicCalibration, IsotonicCalibration, VennAbersCalibration
from torchcalib.calibration.calibrator import Calibrator

METHODS: dict[str, type[Calibrator]] = {
    "isotonic": IsotonicCalibration,
    "cir": CentredIsotonicCalibration,
    "ivap-ovr": VennAbersCalibration,
}
"""Our calibrator for each method of probmetrics."""

N_FOLDS = 5

Fit = Callable[[Floats, Ints, Floats], Floats]


def systems(exact: bool) -> Iterator[tuple[str, Floats, Ints]]:
    """Yield the name, the probabilities `(N, C)` and the labels of every system."""
    for path in sorted(DATA.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            content = {key: arrays[key] for key in arrays}
        for key, values in content.items():
            labels = content.get("y" + key.removeprefix("p")) if key.startswith("p_") else content.get("targets")
            if labels is None or key.startswith(("y_", "targets", "fold")):
                continue
            if len(np.unique(labels)) < 2:  # scikit-learn needs two classes
                continue
            p = values.astype(np.float64)
            if key == "probs" or key.startswith("p_"):
                p = np.stack((1 - p, p), -1)
            else:
                p = torch.from_numpy(p).softmax(-1).numpy()
            yield f"{path.stem} {key}", p if exact else p.astype(np.float32).astype(np.float64), labels.astype(np.int64)


def ours(method: type[Calibrator]) -> Fit:
    def calibrated(p: Floats, y: Ints, new: Floats) -> Floats:
        if p.shape[-1] > 2:
            fitted = method().fit(torch.from_numpy(p), torch.from_numpy(y), task="multiclass", from_logits=False)
            return fitted(torch.from_numpy(new)).numpy()
        fitted = method().fit(torch.from_numpy(p[:, 1]), torch.from_numpy(y), task="binary", from_logits=False)
        found = fitted(torch.from_numpy(new[:, 1])).numpy()
        return np.stack((1 - found, found), -1)

    return calibrated


def theirs(method: str) -> Fit:
    return lambda p, y, new: probmetrics_calibrated(method, (p, y), new)


def cross_validated(fit: Fit, p: Floats, y: Ints, rounds: int) -> tuple[float, float, float]:
    """Return log loss, Brier score and seconds."""
    fold = np.random.default_rng(0).permutation(len(y)) % N_FOLDS
    calibrated, seconds = np.empty_like(p), []
    for _ in range(rounds):
        start = time.process_time()
        for f in range(N_FOLDS):
            calibrated[fold == f] = fit(p[fold != f], y[fold != f], p[fold == f])
        seconds.append(time.process_time() - start)
    of_label = np.take_along_axis(calibrated, y[:, None], -1)[:, 0]
    log_loss = -np.log(of_label.clip(np.finfo(np.float64).eps)).mean()
    brier = ((calibrated**2).sum(-1) - 2 * of_label + 1).mean()
    return float(log_loss), float(brier), min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of names of systems")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--exact", action="store_true", help="do not round probabilities to float32")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("system | method | log loss: ours | theirs | Brier score: ours | theirs | seconds: ours | theirs | ratio")
    for name, p, y in systems(chosen.exact):
        if chosen.words and not any(word in name for word in chosen.words):
            continue
        for method, calibrator in METHODS.items():
            if p.shape[-1] > 2 and "multiclass" not in calibrator.tasks:
                continue
            sides = (ours(calibrator), theirs(method))
            step = max(1, len(p) // 250)
            for fit in sides:  # imports and compiles
                fit(p[::step], y[::step], p[:9])
            (loss, brier, seconds), (*other, slow) = (cross_validated(fit, p, y, chosen.rounds) for fit in sides)
            values = f"{loss:.5f} | {other[0]:.5f} | {brier:.5f} | {other[1]:.5f} | {seconds:.4f} | {slow:.4f}"
            print(f"{name} | {method} | {values} | {seconds / slow:.3f}", flush=True)


if __name__ == "__main__":
    main()
