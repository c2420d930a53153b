"""Numbers of operations on the emulated device: an accelerator waits for the host if a call has many small ones.

`python -m pytest -s` prints them as a table, with TORCHCALIB_TEST_DEVICE=emulated.
"""

import pytest
import torch
from helpers.operations import operations

import torchcalib as tc

pytestmark = pytest.mark.emulated
TASKS = {
    "binary probabilities": {"task": "binary"},
    "binary logits": {"task": "binary", "from_logits": True},
    "multi-class probabilities": {"task": "multiclass", "num_classes": 1000},
    "multi-class logits": {"task": "multiclass", "num_classes": 1000, "from_logits": True},
}


def data(options, device, dtype=torch.float32):
    """Return 256 rows, binary or of 1,000 classes, and their labels."""
    generator = torch.Generator().manual_seed(0)
    if options["task"] == "binary":
        logits, target = torch.randn(256, generator=generator), torch.randint(0, 2, (256,), generator=generator)
        values = logits.sigmoid()
    else:
        logits, target = torch.randn(256, 1000, generator=generator), torch.randint(0, 9, (256,), generator=generator)
        values = logits.softmax(-1)
    return (logits if options.get("from_logits") else values).to(device, dtype), target.to(device)


def eight(**options):
    """Return a collection of eight metrics that consist of sums."""
    metrics = [tc.ECE, tc.MCE, tc.RMSCE, tc.ESCE, tc.NLL, tc.BrierScore, tc.ECD, tc.Accuracy]
    return tc.CalibrationCollection([each(**options) for each in metrics])


def updated(make, dtype=torch.float32, weighted=False, **more):
    """Return a function that prepares the second update of a metric."""

    def prepared(options, device):
        metric, (preds, target) = make(**options, **more).to(device), data(options, device, dtype)
        weights = torch.ones(256, device=device) if weighted else None
        metric.update(preds, target, weights)
        return lambda: metric.update(preds, target, weights)

    return prepared


def forward(make):
    def prepared(options, device):
        metric, given = make(**options).to(device), data(options, device)
        metric(*given)
        return lambda: metric(*given)

    return prepared


def loss(gradient, make=tc.losses.ECELoss):
    def prepared(options, device):
        options = {name: value for name, value in options.items() if name != "num_classes"}
        preds, target = data(options, device)
        preds.requires_grad_()
        run = make(**options)

        def call():
            value = run(preds, target)
            return torch.autograd.grad(value, preds) if gradient else value

        call()
        return call

    return prepared


def function(options, device):
    options = {name: value for name, value in options.items() if name != "num_classes"}
    given = data(options, device)
    tc.ece(*given, **options)
    return lambda: tc.ece(*given, **options)


# Largest numbers of operations for `TASKS`, in their order
JOBS = {
    "ECE.update": (updated(tc.ECE), (40,) * 4),
    "ECE.update, bfloat16": (updated(tc.ECE, dtype=torch.bfloat16), (40,) * 4),
    "ECE.update, weights": (updated(tc.ECE, weighted=True), (40,) * 4),
    "ECE.update, ignore_index": (updated(tc.ECE, ignore_index=-1), (40,) * 4),
    "NLL.update": (updated(tc.NLL), (40,) * 4),
    "update of eight metrics": (updated(eight), (60,) * 4),
    "KS.update": (updated(tc.KS), (30, 30, 48, 72)),
    "ECE.forward": (forward(tc.ECE), (30, 30, 40, 40)),
    "ece": (function, (32, 32, 42, 42)),
    "ECELoss": (loss(False), (32, 32, 58, 64)),
    "ECELoss with gradient": (loss(True), (60, 60, 130, 160)),
    "SoftBinnedECELoss with gradient": (loss(True, tc.losses.SoftBinnedECELoss), (88, 88, 160, 186)),
    "MMCELoss with gradient": (loss(True, tc.losses.MMCELoss), (90, 90, 160, 190)),
    "CanonicalLoss with gradient": (loss(True, tc.losses.CanonicalLoss), (82, 84, 100, 116)),
}


@pytest.mark.parametrize("job", JOBS)
def test_calls_have_few_operations(job, device):
    prepare, most = JOBS[job]
    found = {}
    for (task, options), largest in zip(TASKS.items(), most, strict=True):
        call = prepare(options, device)
        with operations() as names:
            call()
        found[task] = len(names), largest
    print(f"\n{job}:", ", ".join(f"{n} (at most {largest}) for {task}" for task, (n, largest) in found.items()))
    assert all(n <= largest for n, largest in found.values()), found
