"""A small classifier on scikit-learn's digits that becomes over-confident while its accuracy stands still."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise ImportError("the demo needs scikit-learn. Run pip install 'torchcalib[demo]'.") from error

from torchcalib.binned import ECE, ESCE, MCE
from torchcalib.report import Report, ReportBuilder
from torchcalib.scores import ECD, NLL, Brier
from torchcalib.streaming import CalibrationCollection

_N_TRAIN = 250  # few enough to be learnt by heart


class Demo:
    """Trains with full batches, so that a run takes seconds and is the same everywhere."""

    def __init__(self, seed: int = 0) -> None:
        digits = load_digits()
        inputs = torch.from_numpy(digits.data / 16).float()
        labels = torch.from_numpy(digits.target).long()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        train, valid = order[:_N_TRAIN], order[_N_TRAIN:]
        self._train = inputs[train], labels[train]
        self._valid = inputs[valid], labels[valid]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = nn.Sequential(
                nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
            )

    def epochs(self, count: int) -> Iterator[dict[str, float]]:
        """Train, and yield the validation metrics of every epoch."""
        members = (NLL, Brier, ECD, ECE, ESCE, MCE)
        metrics = CalibrationCollection([m(task="multiclass", num_classes=10, from_logits=True) for m in members])
        optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-2)
        inputs, labels = self._train
        for epoch in range(1, count + 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self._model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            logits, target = self._predictions()
            metrics.reset()
            for piece, truth in zip(torch.split(logits, 256), torch.split(target, 256), strict=True):
                metrics.update(piece, truth)
            accuracy = (logits.argmax(-1) == target).double().mean()
            values = {name: float(value) for name, value in metrics.compute().items()}
            yield {"epoch": epoch, "training loss": loss.item(), "accuracy": float(accuracy), **values}

    def report(self) -> Report:
        """Report on the validation predictions of the model as it is now."""
        builder = ReportBuilder(task="multiclass", from_logits=True)
        builder.update(*self._predictions())
        return builder.report(source={"model": "a small network", "data": "scikit-learn's digits, validation part"})

    def save_predictions(self, folder: Path) -> Path:
        """Write the validation logits and targets to `predictions.npz` and return its path."""
        logits, target = self._predictions()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "predictions.npz"
        np.savez_compressed(path, logits=logits.numpy(), targets=target.numpy())
        return path

    @torch.no_grad()
    def _predictions(self) -> tuple[Tensor, Tensor]:
        inputs, labels = self._valid
        return self._model(inputs), labels
