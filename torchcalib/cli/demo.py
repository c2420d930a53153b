"""The command `torchcalib demo`: train a classifier that becomes over-confident at constant accuracy."""

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise ImportError("`torchcalib demo` requires scikit-learn. Run pip install 'torchcalib[demo]'.") from error

from torchcalib.cli.files import check_pages
from torchcalib.cli.inputs import make_folder
from torchcalib.cli.messages import computing, output, working
from torchcalib.integrations.monitoring.monitor import Monitor
from torchcalib.integrations.monitoring.over_confidence import OverConfidenceWarning
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.render import terminal

_N_TRAIN = 250  # number of training samples, small enough for over-fitting


def demo(arguments: argparse.Namespace, _: Any) -> None:
    """Train the classifier, print its metrics after every epoch, and write a report on the validation data."""
    check_pages(arguments.out)
    make_folder(arguments.out)
    digits = load_digits()
    inputs, labels = torch.from_numpy(digits.data / 16).float(), torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(arguments.seed))
    train, valid = order[:_N_TRAIN], order[_N_TRAIN:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(arguments.seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    monitor = Monitor(task="multiclass", num_classes=10, from_logits=True)
    epochs = _epochs(model, (inputs[train], labels[train]), (inputs[valid], labels[valid]), monitor, arguments.epochs)
    if arguments.json:
        list(epochs)
    else:
        terminal.show_epochs(epochs, title="Validation metrics by epoch")
        terminal.show_warnings(monitor.history)
    with torch.no_grad():
        logits = model(inputs[valid])
    builder = ReportBuilder(task="multiclass", from_logits=True)
    builder.update(logits, labels[valid])
    source = {"model": "a small network", "data": "scikit-learn digits, validation split"}
    with computing("computing values, intervals and calibrators"):
        finished = replace(builder.report(source=source), history=monitor.history)
    predictions = Path(arguments.out) / "predictions.npz"
    with working("writing the files"):
        paths = finished.save(arguments.out, diagrams=arguments.diagrams)
    np.savez_compressed(predictions, logits=logits.numpy(), targets=labels[valid].numpy())
    if arguments.json:
        output(finished.to_json())
        return
    terminal.show(finished)
    terminal.show_paths((*paths, predictions))


def _epochs(
    model: nn.Module, train: tuple[Tensor, Tensor], valid: tuple[Tensor, Tensor], monitor: Monitor, count: int
) -> Iterator[dict[str, float]]:
    """Train on one full batch per epoch, and yield the training loss and validation metrics of each epoch by name."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(1, count + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(train[0]), train[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            logits = model(valid[0])
        for piece, target in zip(torch.split(logits, 256), torch.split(valid[1], 256), strict=True):
            monitor.update(piece, target)
        with warnings.catch_warnings(action="ignore", category=OverConfidenceWarning):  # `demo` prints the warnings
            monitor.end_epoch(epoch)
        yield {"epoch": epoch, "training loss": loss.item(), **monitor.history.rows[-1].values}
