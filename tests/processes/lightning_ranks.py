"""Script for test_lightning.py: train with DDP on two processes, and write the results of each rank as JSON."""

import json
import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from integrations.test_lightning import GIVEN, N_CLASSES, loader, monitor, rows

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.calibration import TemperatureScaling

N_VALID = (13, 4)  # the sampler of the first loader repeats a row


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, N_CLASSES)
        self.nll = tc.NLL(num_classes=N_CLASSES, **GIVEN)
        self.epochs = []

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.linear(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits = self.linear(batch[0])
        if dataloader_idx == 0:
            self.nll.update(logits, batch[1])
            self.log("own", self.nll, add_dataloader_idx=False)
        return logits, batch[1]

    def whole(self, index):
        x, y = rows(N_VALID[index], 1 + index)
        return self.linear(x.double()).detach(), y

    def on_validation_end(self):
        if self.trainer.sanity_checking:
            return
        functions = {"nll": F.nll, "ece": F.ece, "ecd": F.ecd, "accuracy": F.accuracy}
        logits, y = self.whole(0)
        # torchmetrics counts the repeated row twice.
        expected = {"own": float(F.nll(logits, y, weights=torch.tensor([2] + [1] * 12), **GIVEN))}
        for index in range(2):
            for name, function in functions.items():
                expected[f"val/{name}/dataloader_idx_{index}"] = float(function(*self.whole(index), **GIVEN))
        values = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        self.epochs.append({"expected": expected, "values": values})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main(folder):
    warnings.simplefilter("ignore")
    pl.seed_everything(0)
    model, watched = Model(), monitor(calibrate=TemperatureScaling(), diagrams_every=0)
    stop = pl.callbacks.EarlyStopping("val/nll/dataloader_idx_1", patience=1, min_delta=10.0)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", precision="64-true", max_epochs=20, callbacks=[watched, stop],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader(24, 0), [loader(n, 1 + index, batch_size=4) for index, n in enumerate(N_VALID)])
    expected = TemperatureScaling().fit(*model.whole(0), **GIVEN)
    results = {
        "epochs": model.epochs,
        "alpha": watched.calibrator.alpha.item(),
        "alpha expected": expected.alpha.item(),
        "stopped": trainer.current_epoch,
    }
    Path(folder, f"{trainer.global_rank}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    os._exit(0)  # Lightning keeps the process group, whose threads can abort while the interpreter ends (torch #190489)


if __name__ == "__main__":
    main(sys.argv[1])
