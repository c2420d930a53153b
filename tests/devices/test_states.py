"""Streaming, merging, saving and moving of metrics and wrappers on the emulated device."""

import pickle

import pytest
import torch
from helpers.emulated_device import recorded_reads
from helpers.fits import data, multi

import torchcalib as tc
from torchcalib.core.batch import states_after

pytestmark = pytest.mark.emulated
LOGITS, LABELS = data(60, 4)
GROUPS = torch.arange(60) % 5
CLASSES = {**multi, "num_classes": 4}
MAKE = {
    "sums": lambda **more: tc.ECE(**CLASSES, **more),
    "samples": lambda **more: tc.ACE(**CLASSES, **more),
    "histogram": lambda **more: tc.KS(**CLASSES, resolution=64, **more),
    "pairs": lambda **more: tc.SKCE(**CLASSES, **more),
    "groups of sums": lambda **more: tc.ByGroup(tc.ECE(**CLASSES), num_groups=5, **more),
    "groups of samples": lambda **more: tc.ByGroup(tc.ACE(**CLASSES), num_groups=5, **more),
    "groups of pairs": lambda **more: tc.ByGroup(tc.SKCE(**CLASSES), num_groups=5, **more),
    "clusters of sums": lambda **more: tc.Clustered(tc.ECE(**CLASSES), **more),
    "clusters of samples": lambda **more: tc.Clustered(tc.ACE(**CLASSES), **more),
    "images": lambda **more: tc.ECE(**CLASSES, per_image=True, **more),
    "images in classes": lambda **more: tc.ECE(**CLASSES, mode="classwise", per_image=True, **more),
    "bootstrap": lambda **more: tc.Bootstrapped(tc.ECE(**CLASSES), n_replicates=39, **more),
}
# Largest number of reads of `compute`: 1 for the validity of the rows, and the given reasons
READS = {
    "groups of samples": (5, "4: groups of equal size, which are evaluated together"),
    "clusters of sums": (2, "1: number of clusters"),
    "clusters of samples": (4, "3: distinct clusters"),
    "histogram": (2, "1: largest count"),
}
EXTRA = {"groups": {"groups": GROUPS}, "clusters": {"clusters": GROUPS}}
of_each = pytest.mark.parametrize("name", MAKE)


def update(metric, name, rows, device="cpu"):
    extra = {key: column[rows].to(device) for key, column in EXTRA.get(name.split()[0], {}).items()}
    metric.update(LOGITS[rows].to(device), LABELS[rows].to(device), **extra)
    return metric


def streamed(name, device="cpu"):
    """Return a metric after two updates."""
    metric = MAKE[name]().to(device)
    return update(update(metric, name, slice(25), device), name, slice(25, 60), device)


def close(metric, expected, device):
    value = metric.compute()
    assert value.device == device
    torch.testing.assert_close(value.cpu(), expected.compute(), equal_nan=True)


@of_each
def test_updates_read_nothing_and_compute_reads_few_values(name, device):
    metric, weighted = (MAKE[name]().to(device) for _ in range(2))
    columns = {key: column.to(device) for key, column in EXTRA.get(name.split()[0], {}).items()}
    preds, target = LOGITS.to(device), LABELS.to(device)
    with recorded_reads() as reads:
        for _ in range(3):
            metric.update(preds, target, **columns)
        weighted.update(preds, target, weights=target, **columns)
    assert (list(reads), reads.uploads) == ([], 0)
    most, why = READS.get(name, (1, ""))
    with recorded_reads() as reads:
        metric.compute()
    assert reads.at_most(most), f"{len(reads)} reads instead of {most} ({why})"


@of_each
def test_merged_saved_and_moved_states_give_the_value_of_one_stream(name, device, tmp_path):
    expected = streamed(name)
    first = update(MAKE[name](persistent=True).to(device), name, slice(25), device)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    loaded = MAKE[name](persistent=True).to(device)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    moved = update(MAKE[name](), name, slice(25)).to(device)
    for metric in (first, loaded, moved, pickle.loads(pickle.dumps(first)), first.clone()):
        update(metric, name, slice(25, 60), device)
        close(metric, expected, device)
    close(first.to("cpu"), expected, torch.device("cpu"))
    if name != "bootstrap":  # replicates of two metrics need different seeds
        merged = update(MAKE[name]().to(device), name, slice(25), device)
        merged.merge_state(update(MAKE[name]().to(device), name, slice(25, 60), device))
        close(merged, expected, device)


@of_each
def test_predictions_on_another_device_are_refused(name, device):
    with pytest.raises(ValueError, match=r"`preds` must be on the metric's device.*Move the metric"):
        update(MAKE[name](), name, slice(25), device)
    with pytest.raises(ValueError, match=r"`preds` must be on the metric's device.*Move the metric"):
        update(MAKE[name]().to(device), name, slice(25))


@pytest.mark.parametrize("name", ["sums", "clusters of samples", "groups of sums", "bootstrap", "clusters of sums"])
def test_tests_and_intervals_are_those_of_the_cpu(name, device):
    found, expected = streamed(name, device), streamed(name)
    if name in ("bootstrap", "clusters of sums"):
        torch.testing.assert_close(found.interval().replicates.cpu(), expected.interval().replicates)
    else:
        found, expected = (metric.test(n_replicates=39) for metric in (found, expected))
        for field in ("statistic", "noise_floor", "p_value", "low", "high"):
            torch.testing.assert_close(getattr(found, field).cpu(), getattr(expected, field), equal_nan=True)


def test_a_collection_shares_its_work_on_the_device(device):
    def collection():
        return tc.CalibrationCollection({name: MAKE[name]() for name in ("sums", "samples", "histogram", "pairs")})

    preds, target = LOGITS.to(device), LABELS.to(device)
    metrics, expected = collection().to(device), collection()
    with recorded_reads() as reads:
        metrics.update(preds, target)
        metrics.update(preds[:10], target[:10])
    assert (list(reads), reads.uploads) == ([], 0)
    expected.update(LOGITS, LABELS)
    expected.update(LOGITS[:10], LABELS[:10])
    values = metrics.compute()
    for name, value in expected.compute().items():
        torch.testing.assert_close(values[name].cpu(), value)


BAD = {"NaN": (torch.nan, 0), "a value out of range": (1.5, 0), "a wrong label": (0.5, 7)}


@pytest.mark.parametrize("name", BAD)
def test_invalid_rows_are_left_out_of_sums_and_raise_in_compute(name, device):
    p, y = torch.tensor([0.2, 0.7, 0.9], device=device), torch.tensor([0, 1, 1], device=device)
    value, label = BAD[name]
    bad, good = (tc.ECE(task="binary").to(device) for _ in range(2))
    for _ in range(2):
        bad.update(torch.cat((p, p.new_tensor([value]))), torch.cat((y, y.new_tensor([label]))))
        good.update(p, y)
    assert torch.equal(bad.state[2:], good.state[2:])
    with pytest.raises(ValueError, match="must get valid rows, got 2 with NaN"):
        bad.compute()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("n_classes", [2, 300])
def test_labels_of_any_integer_type_give_the_state_of_int64(dtype, n_classes, device):
    logits = torch.randn(40, n_classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = (torch.arange(40) % 2).to(device)
    options = {"task": "multiclass", "num_classes": n_classes, "from_logits": True, "ignore_index": -100}
    found, expected = (tc.CalibrationCollection([tc.ECE(**options), tc.NLL(**options)]).to(device) for _ in range(2))
    found.update(logits.to(device), target.to(dtype))
    expected.update(logits.to(device), target)
    for name in ("ECE", "NLL"):
        torch.testing.assert_close(found[name].state, expected[name].state)


def test_values_with_gradient_are_those_of_the_kernel(device, monkeypatch):
    """`tests/core/test_batch.py` tests the kernel, which requires Triton."""
    invalid = []

    def error_of_batch(how, kind, norm, state, preds, target, weights, formula):
        after = states_after(how, [kind], [state], preds.detach(), target, weights)
        invalid.append(after[0][0].item())
        return norm == "l2" and (
            preds.sum() * torch.nan if invalid[-1] else formula(how, preds, target, weights),
            *after,
        )

    monkeypatch.setattr("torchcalib.metrics.base.error_of_batch", error_of_batch)
    monkeypatch.setattr("torchcalib.core.batch.error_of_batch", error_of_batch)
    metric, expected, results = tc.RMSCE(**CLASSES).to(device), tc.RMSCE(**CLASSES), []
    for each, where in ((metric, device), (expected, "cpu")):
        leaf = LOGITS.to(where).requires_grad_()
        each.update(leaf[:9].detach(), LABELS[:9].to(where))
        value = each(leaf, LABELS.to(where))
        assert not each.state.requires_grad
        results.append((value.detach().cpu(), torch.autograd.grad(value, leaf)[0].cpu()))
    torch.testing.assert_close(*results)
    close(metric, expected, device)
    assert invalid == [0]
    leaf = LOGITS.to(device).requires_grad_()
    value = tc.rmsce(leaf, LABELS.to(device), **multi)
    torch.testing.assert_close(value.detach().cpu(), tc.rmsce(LOGITS, LABELS, **multi))
    with pytest.raises(ValueError, match="`preds` must not contain NaN"):
        tc.rmsce(leaf * torch.nan, LABELS.to(device), **multi)
    assert invalid == [0, 0, 60]
