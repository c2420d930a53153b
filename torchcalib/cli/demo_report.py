"""A small classifier of scikit-learn's digits that becomes over-confident while its accuracy stays the same."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise ImportError("the demo needs scikit-learn. Run pip install 'torchcalib[demo]'.") from error

from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.data import Report
from torchcalib.reporting.monitoring.monitor import Monitor
from torchcalib.reporting.monitoring.over_confidence import OverConfidenceWarning

_N_TRAIN = 250  # few enough to be memorised


class Demo:
    """Training with full batches, which takes seconds and is deterministic.

    Attributes:
        monitor: metrics of the validation data.
    """

    def __init__(self, seed: int = 0) -> None:
        self.monitor = Monitor(task="multiclass", num_classes=10, from_logits=True)
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
        """Train, and yield the metrics of every epoch."""
        optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-2)
        inputs, labels = self._train
        for epoch in range(1, count + 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self._model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            logits, target = self._predictions()
            for piece, truth in zip(torch.split(logits, 256), torch.split(target, 256), strict=True):
                self.monitor.update(piece, truth)
            with warnings.catch_warnings():  # the command prints them
                warnings.simplefilter("ignore", OverConfidenceWarning)
                self.monitor.end_epoch(epoch)
            yield {"epoch": epoch, "training loss": loss.item(), **self.monitor.history.rows[-1].values}

    def report(self) -> Report:
        """Report on the present validation predictions, with the history of the training."""
        builder = ReportBuilder(task="multiclass", from_logits=True)
        builder.update(*self._predictions())
        source = {"model": "a small network", "data": "scikit-learn's digits, validation part"}
        return replace(builder.report(source=source), history=self.monitor.history)

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
