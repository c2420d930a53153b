"""Public calls on the emulated device: values of the CPU, and the number of values that the host reads.

`CALLS` states the largest number of reads of each call, with the reason for every read. A read is an operation for
which the host waits for the device. It may copy many numbers.
"""

import dataclasses
from collections.abc import Callable, Mapping

import pytest
import torch
from helpers.emulated_device import recorded_reads
from helpers.fits import ALL, BETA, ENSEMBLE, ISO, OF_CLASSES, QUADRATIC, D, binary, data, fresh, multi, name, single
from helpers.reports import QUICK

import torchcalib as tc
import torchcalib.functional as F
from torchcalib import calibration, inference, losses

pytestmark = pytest.mark.emulated
LOGITS, LABELS = data(60, 4)
ODDS, HITS = single(60)
GROUPS = torch.arange(60) % 5
COST = tc.CostMatrix.zero_one(4)
CLASSES = {**multi, "num_classes": 4}
FEW = {"n_replicates": 39}
ROWS = "1: validity of the rows"
PAVA = "3 per fit, and 1 per round of pooling"
NEWTON = "1 per Newton step"
TABLES = "1 per column of each table"
LONG = ("report with calibrators",)


@dataclasses.dataclass(frozen=True)
class Call:
    """A public call.

    Attributes:
        run: calls it with data `(preds, target, groups)` on a device, and returns values of any type.
        reads: largest number of reads.
        why: reason for each read.
        task: task of the data.
    """

    run: Callable
    reads: int
    why: str = ""
    task: str = "multiclass"


def with_gradient(loss):
    def run(x, y, g):
        x = x.clone().requires_grad_()
        value = loss(x, y)
        value.backward()
        return value, x.grad

    return run


class Model(torch.nn.Module):
    """Return the logits times a parameter on the device of the model."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x):
        return self.scale * x


def evaluated(x, y, g):
    """Evaluate a model on the device, with batches on the CPU."""
    batches = list(zip(x.cpu().split(25), y.cpu().split(25), strict=True))
    return tc.evaluate(Model(), batches, device=x.device, from_logits=True, progress=False, **QUICK).to_dict()


def built(x, y, g):
    """Merge two builders."""
    first, second = (tc.ReportBuilder(**multi, **QUICK) for _ in range(2))
    first.update(x[:30], y[:30])
    second.update(x[30:], y[30:])
    first.merge(second)
    return first.report().to_dict()


def monitored(x, y, g):
    monitor = tc.Monitor(**CLASSES)
    monitor.update(x, y)
    return monitor.compute()


FUNCTIONS = {
    "calibration_curve": Call(lambda x, y, g: F.calibration_curve(x, y, **multi), 5, f"{ROWS}; 4: bands"),
    "tce_table": Call(lambda x, y, g: F.tce_table(x, y, **binary), 15, f"{ROWS}; 3: blocks; rest: tests", "binary"),
    "corp_curve": Call(lambda x, y, g: F.corp_curve(x, y, **FEW, **binary), 30, f"{ROWS}; 2 fits: {PAVA}", "binary"),
    "risk_coverage_curve": Call(lambda x, y, g: F.risk_coverage_curve(x, y, **multi), 2, f"{ROWS}; 1: counts"),
    "bayes_decisions": Call(
        lambda x, y, g: F.bayes_decisions(x, "multiclass", cost=COST, from_logits=True), 1, "1: validity of the rows"
    ),
    "expected_cost": Call(lambda x, y, g: F.expected_cost(y.flip(0), y, cost=COST), 2, "2: both columns of labels"),
    "bayes_risk_curve": Call(lambda x, y, g: F.bayes_risk_curve(x, y, **binary), 1, ROWS, "binary"),
    "bayes_risk_area": Call(lambda x, y, g: F.bayes_risk_area(x, y, **binary), 1, ROWS, "binary"),
    "optimal_threshold_cost": Call(lambda x, y, g: F.optimal_threshold_cost(x, y, **binary), 1, ROWS, "binary"),
    "smece_width": Call(lambda x, y, g: F.smece_width(x, y, **binary), 1, ROWS, "binary"),
    "canonical_error": Call(lambda x, y, g: F.canonical_error(x, y, **multi), 1, ROWS),
    "skce": Call(lambda x, y, g: F.skce(x, y, estimator="biased", bandwidth="median", **multi), 1, ROWS),
    "cox": Call(lambda x, y, g: F.cox(x, y, **binary), 25, f"{ROWS}; {NEWTON}", "binary"),
    "by_group": Call(
        lambda x, y, g: F.by_group(F.ece, x, y, g, **multi), 10, "4: groups and their sizes; rows of all, and 5 groups"
    ),
    "nees": Call(
        lambda x, y, g: F.nees(torch.distributions.Normal(x, x.exp()), x + 1), 2, "2: checks of torch.distributions"
    ),
}
INFERENCE = {
    "bootstrap(ece)": Call(lambda x, y, g: inference.bootstrap(F.ece, x, y, **FEW, **multi), 4, "4: rows, 3 calls"),
    "bootstrap(ace)": Call(
        lambda x, y, g: inference.bootstrap(F.ace, x, y, **FEW, **multi), 5, "4: rows, 3 calls; 1: large counts"
    ),
    "bootstrap(groups)": Call(
        lambda x, y, g: inference.bootstrap(F.ece, x, y, groups=g, **FEW, **multi), 9, "3: rows; 6: distinct groups"
    ),
    "skce_test": Call(lambda x, y, g: inference.skce_test(x, y, **multi), 1, ROWS),
    "calibration_test(ECE)": Call(
        lambda x, y, g: inference.calibration_test(tc.ECE(**CLASSES).to(x.device), x, y, **FEW), 3, f"{ROWS}; 2: noise"
    ),
    "calibration_test(KS)": Call(
        lambda x, y, g: inference.calibration_test(tc.KS(**CLASSES).to(x.device), x, y, **FEW), 3, f"{ROWS}; 2: noise"
    ),
    "calibration_test(SmECE)": Call(
        lambda x, y, g: inference.calibration_test(tc.SmECE(**CLASSES).to(x.device), x, y, **FEW),
        40,
        f"{ROWS}; 1: occupied cells; 2: noise; 11 widths for data and 2 batches of replicates",
    ),
    "calibration_test(clusters)": Call(
        lambda x, y, g: inference.calibration_test(tc.ECE(**CLASSES).to(x.device), x, y, clusters=g, **FEW),
        8,
        f"{ROWS}; 7: distinct clusters and their number",
    ),
}
GAINS = {
    "calibration_loss": Call(lambda x, y, g: calibration.calibration_loss(x, y, **multi), 60, f"fits: {NEWTON}"),
    "score_divergence": Call(lambda x, y, g: calibration.score_divergence(x, y, **multi), 60, f"fits: {NEWTON}"),
    "cross_val_calibrate": Call(lambda x, y, g: calibration.cross_val_calibrate(x, y, **multi), 60, f"fits: {NEWTON}"),
    "recommend": Call(
        lambda x, y, g: calibration.recommend(x, y, calibrators=[D, ISO], **multi), 200, f"fits: {NEWTON}"
    ),
}
LOSSES = {
    loss.__name__: Call(with_gradient(loss(**multi)), 0)
    for loss in (losses.ECELoss, losses.SoftBinnedECELoss, losses.MMCELoss, losses.SKCELoss, losses.CanonicalLoss)
} | {
    "soft_binned_ece": Call(with_gradient(lambda x, y: losses.soft_binned_ece(x, y, **multi)), 0),
    "mmce": Call(with_gradient(lambda x, y: losses.mmce(x, y, **multi)), 0),
}
REPORTS = {
    "report": Call(lambda x, y, g: tc.report(x, y, groups=g, **QUICK, **multi).to_dict(), 150, TABLES),
    "report with calibrators": Call(lambda x, y, g: tc.report(x, y, **multi).to_dict(), 1500, f"{TABLES}; {NEWTON}"),
    "compare": Call(
        lambda x, y, g: tc.compare({"a": x, "b": 2 * x}, y, **FEW, **multi).to_dict(), 400, "1 per line and column"
    ),
    "ReportBuilder": Call(built, 150, TABLES),
    "evaluate": Call(evaluated, 150, TABLES),
    "Monitor": Call(monitored, 25, "3 per metric: validity of the rows, value, noise"),
}
FITS_OF_LABELS = {"HistogramBinning": 2, "VennAbersCalibration": 5}


def fits():
    """Yield a call for the fit of each calibrator. No forward pass reads anything."""
    for each in (*ALL, *OF_CLASSES):
        if each is ENSEMBLE:
            continue
        task = "binary" if each in (BETA, QUADRATIC) else "multiclass"
        options = binary if task == "binary" else multi

        def fit(x, y, g, each=each, options=options):
            return fresh(each).fit(x, y, **options).state_dict()

        def forward(x, y, g, each=each, task=task, options=options):
            given = (ODDS, HITS) if task == "binary" else (LOGITS, LABELS)
            return fresh(each).fit(*given, **options).to(x.device)(x)

        yield f"{name(each)}.fit", Call(fit, FITS_OF_LABELS.get(name(each), 60), f"{NEWTON}, or {PAVA}", task)
        yield f"{name(each)}.forward", Call(forward, 0, "", task)


CALLS = FUNCTIONS | INFERENCE | GAINS | LOSSES | REPORTS | dict(fits())


def values_of(result):
    """Yield all tensors and numbers of a result, as tensors on the CPU."""
    if isinstance(result, torch.Tensor | float):
        yield torch.as_tensor(result).detach().cpu()
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from values_of(value)
    elif isinstance(result, list | tuple):
        for value in result:
            yield from values_of(value)
    elif dataclasses.is_dataclass(result):
        yield from values_of(vars(result))


@pytest.mark.filterwarnings("ignore:the fitted scale is 0")
@pytest.mark.parametrize("call", [pytest.param(c, marks=[pytest.mark.extended] * (c in LONG)) for c in CALLS])
def test_calls_give_the_values_of_the_cpu_and_read_few_values(call, device):
    call = CALLS[call]
    given = (ODDS, HITS, GROUPS) if call.task == "binary" else (LOGITS, LABELS, GROUPS)
    expected = list(values_of(call.run(*given)))
    moved = [x.to(device) for x in given]
    with recorded_reads() as reads:
        found = call.run(*moved)
    assert len(reads) <= call.reads, f"{len(reads)} reads instead of {call.reads} ({call.why})"
    found = list(values_of(found))
    assert expected
    for mine, cpu in zip(found, expected, strict=True):
        # Fits end when a step changes their loss only by rounding, so that parameters agree to about 1e-7.
        torch.testing.assert_close(mine, cpu, rtol=1e-6, atol=1e-9, equal_nan=True)
