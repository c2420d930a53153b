"""Script of `make wheel-test`: use the installed package in a temporary folder, as a user without a checkout would.

It writes predictions and runs `torchcalib report` on them. With `--train` it also trains for one epoch in Lightning,
with `CalibrationMonitor`. Python's option `-I` ignores the current folder and PYTHONPATH.
"""

import os
import subprocess
import sys
import sysconfig
import warnings
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import torchcalib

N_CLASSES = 3


def rows(n, seed):
    """Return inputs and targets, with the class probabilities softmax(2 inputs)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, N_CLASSES, generator=g)
    return x, torch.multinomial((2 * x).softmax(-1), 1, generator=g).squeeze(-1)


def run_report():
    """Write predictions and run the command of the installed package on them."""
    x, y = rows(300, 0)
    np.savez("predictions.npz", logits=(4 * x).numpy(), targets=y.numpy())
    command = Path(sysconfig.get_path("scripts"), "torchcalib")
    options = {"check": True, "capture_output": True, "text": True}
    printed = subprocess.run([command, "report", "predictions.npz", "--out", "report"], **options).stdout
    assert "over-confident" in printed, printed
    page = Path("report", "report.html").read_text(encoding="utf-8")
    assert all(part in page for part in ("<style>", "<script>", "<svg")), "the page is incomplete"
    shown = subprocess.run([command, "--version"], **options).stdout
    assert shown.split()[-1] == torchcalib.__version__, shown


def train():
    """Train for one epoch with `CalibrationMonitor`."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(N_CLASSES, N_CLASSES)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.linear(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            return self.linear(batch[0]), batch[1]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    training = DataLoader(TensorDataset(*rows(300, 1)), batch_size=50)
    validation = DataLoader(TensorDataset(*rows(200, 2)), batch_size=50)
    monitor = torchcalib.integrations.CalibrationMonitor(task="multiclass", num_classes=N_CLASSES, from_logits=True)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[monitor],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), training, validation)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert 0 < values["val/ece"] < 1, values
    assert values["val/nll"] > 0, values


def main(arguments):
    """Check where the package is installed, and use it."""
    installed = Path(torchcalib.__file__).resolve()
    assert installed.is_relative_to(Path(sysconfig.get_path("purelib")).resolve()), installed
    assert version("torchcalib") == torchcalib.__version__
    assert (installed.parent / "py.typed").is_file()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        run_report()
        if "--train" in arguments:
            warnings.simplefilter("ignore")  # of Lightning, about few worker processes
            train()
        os.chdir("/")
    print(f"torchcalib {torchcalib.__version__} runs from {installed.parent}")


if __name__ == "__main__":
    main(sys.argv[1:])
