"""`SequentialMonitor` adds the rows of each `trainer.test` to one test, in a real Trainer."""

import importlib

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchcalib as tc

pl = pytest.importorskip("lightning.pytorch")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),  # a deprecated name of torch
]


class Model(pl.LightningModule):
    def test_step(self, batch, batch_idx):
        return {"logits": batch[0], "target": batch[1]}


@pytest.fixture
def monitor():
    cls = importlib.import_module("torchcalib.integrations").SequentialMonitor
    return cls(tc.SequentialTest(task="binary", from_logits=True))


def week(seed, temperature=2.0):
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(90, generator=g)
    return TensorDataset(logits, torch.bernoulli((logits / temperature).sigmoid(), generator=g).long())


def trainer_of(monitor):
    return pl.Trainer(
        callbacks=[monitor], accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def test_evidence_of_all_tests_is_that_of_one_stream(monitor):
    trainer, expected = trainer_of(monitor), tc.SequentialTest(task="binary", from_logits=True)
    for seed in range(4):
        data = week(seed)
        (logged,) = trainer.test(Model(), DataLoader(data, batch_size=40), verbose=False)
        for start in (0, 40, 80):
            expected.update(*data[start : start + 40])
        values = expected.result().flat()
        assert logged == {f"test/{name}": pytest.approx(value) for name, value in values.items()}
    assert bool(monitor.test.alarm())
    again = type(monitor)(tc.SequentialTest(task="binary", from_logits=True))
    again.load_state_dict(monitor.state_dict())
    assert int(again.test.since) == int(monitor.test.since) > 0


def test_repeated_rows_and_other_metrics_are_refused(monitor):
    data = week(0)
    sampler = DistributedSampler(data, num_replicas=4, rank=0, shuffle=False)
    with pytest.raises(ValueError, match="`dataloaders` must not repeat rows"):
        trainer_of(monitor).test(Model(), DataLoader(data, batch_size=40, sampler=sampler), verbose=False)
    with pytest.raises(TypeError, match="`test` must be a SequentialTest, got ECE"):
        type(monitor)(tc.ECE(task="binary"))
