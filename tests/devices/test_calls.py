"""Public calls on the emulated device: values of the CPU, and the number of values that the host reads.

`CALLS` states the largest number of reads of each call, with the reason for every read. A read is an operation for
which the host waits for the device. It may copy many numbers.
"""

import dataclasses
from collections.abc import Callable, Mapping

import pytest
import torch
from cases import CASES
from helpers.emulated_device import recorded_reads
from helpers.fits import ALL, ISO, OF_CLASSES, D, binary, data, fresh, multi, name, single
from helpers.reports import QUICK

import torchcalib as tc
import torchcalib.functional as F
from torchcalib import calibration, inference, losses, special

pytestmark = pytest.mark.emulated
LOGITS, LABELS = data(60, 4)
ODDS, HITS = single(60)
GROUPS = torch.arange(60) % 5
COST = tc.CostMatrix.zero_one(4)
CLASSES = {**multi, "num_classes": 4}
FEW = {"n_replicates": 39}
ROWS = "1: validity of the rows"
NOISE = "2: variances of simulated counts"
PAVA = "3 per fit, and 1 per round of pooling"
NEWTON = "1 per Newton step"
TABLES = "about 1 per test, column of classes and number in the text"
SLOW = ("report with calibrators", "compare", "evaluate", "ReportBuilder", "recommend", "minimum_detectable_error",
        "required_n", "relative_calibration_loss", "score_divergence", "cross_val_calibrate", "calibration_test(SmECE)",
        "VennAbersCalibration.fit")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """A public call."""

    run: Callable  # calls it with data `(preds, target, groups)` on a device, and returns values of any type
    reads: int  # largest number of reads
    why: str = ""  # reason for each read
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


def worst_groups(x, y, g):
    metric = tc.ByGroup(tc.ECE(**CLASSES), num_groups=5).to(x.device)
    metric.update(x, y, groups=g)
    return metric.worst(n_replicates=39)


def plotted(x, y, g):
    """Return the curve that a metric draws."""
    metric = tc.ECE(**binary).to(x.device)
    metric.update(x, y)
    return [list(map(float, line.get_ydata())) for line in metric.plot()[1].get_lines()]


def monitored(x, y, g):
    monitor = tc.Monitor(**CLASSES)
    monitor.update(x, y)
    return monitor.compute()


FUNCTIONS = {
    "calibration_curve": Call(lambda x, y, g: F.calibration_curve(x, y, **multi), 5, f"{ROWS}; 4: bands"),
    "tce_table": Call(lambda x, y, g: F.tce_table(x, y, **binary), 15, f"{ROWS}; 3: blocks; rest: tests", "binary"),
    "optimal_bins": Call(lambda x, y, g: F.optimal_bins(x, y, **binary), 12, f"{ROWS}; rounds; 1: bins", "binary"),
    "near_optimal_bins": Call(lambda x, y, g: F.near_optimal_bins(x, y, **binary), 6, f"{ROWS}; 3: blocks", "binary"),
    "corp_curve": Call(lambda x, y, g: F.corp_curve(x, y, **FEW, **binary), 24, f"{ROWS}; 2 fits: {PAVA}", "binary"),
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
    "corp": Call(lambda x, y, g: F.corp(x, y, **binary), 8, f"{ROWS}; fit: {PAVA}", "binary"),
    "cox": Call(lambda x, y, g: F.cox(x, y, **binary), 16, f"{ROWS}; {NEWTON}", "binary"),
    "sequential_test": Call(
        lambda x, y, g: F.sequential_test(x, y, **binary).log_e, 4, f"{ROWS}; rest: the result", "binary"
    ),
    "boundary_band": Call(lambda x, y, g: F.boundary_band(y.reshape(6, 10), 1.5, ignore_index=0), 0),
    "mean_probabilities": Call(lambda x, y, g: F.mean_probabilities([x, -x], "multiclass", from_logits=True), 0),
    "ece(per_image)": Call(lambda x, y, g: F.ece(x, y, **multi, per_image=True), 1, ROWS),
    "by_group": Call(
        lambda x, y, g: F.by_group(F.ece, x, y, g, **multi), 10, "4: groups and their sizes; rows of all, and 5 groups"
    ),
    "from_hidden": Call(lambda x, y, g: F.from_hidden(F.ece, x, torch.eye(4).to(x), y), 1, ROWS),
    "spiegelhalter": Call(lambda x, y, g: F.spiegelhalter(x, y, **binary), 1, ROWS, "binary"),
    "nees_interval": Call(lambda x, y, g: F.nees_interval(50, dimension=2), 0),
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
        lambda x, y, g: inference.calibration_test(tc.ECE(**CLASSES).to(x.device), x, y, **FEW),
        3,
        f"{ROWS}; {NOISE}",
    ),
    "calibration_test(KS)": Call(
        lambda x, y, g: inference.calibration_test(tc.KS(**CLASSES).to(x.device), x, y, **FEW),
        3,
        f"{ROWS}; {NOISE}",
    ),
    "calibration_test(SmECE)": Call(
        lambda x, y, g: inference.calibration_test(tc.SmECE(**CLASSES).to(x.device), x, y, **FEW),
        40,
        f"{ROWS}; 1: occupied cells; {NOISE}; 11 widths for data and 2 batches of replicates",
    ),
    "required_n": Call(
        lambda x, y, g: float(inference.required_n(preds=x, error=0.1, from_logits=True)),
        2,
        "the sample is copied",
        "binary",
    ),
    "minimum_detectable_error": Call(
        lambda x, y, g: inference.minimum_detectable_error(preds=x, from_logits=True),
        2,
        "the sample is copied",
        "binary",
    ),
    "calibration_test(clusters)": Call(
        lambda x, y, g: inference.calibration_test(tc.ECE(**CLASSES).to(x.device), x, y, clusters=g, **FEW),
        8,
        f"{ROWS}; 7: distinct clusters and their number",
    ),
}
SPECIAL = {
    "betainc": Call(lambda x, y, g: special.betainc(x.sigmoid(), 1.5, x.sigmoid()), 0, "", "binary"),
    "binomial_test": Call(lambda x, y, g: special.binomial_test(g, g + 5, x.sigmoid()), 0, "", "binary"),
}
GAINS = {
    "calibration_loss": Call(lambda x, y, g: calibration.calibration_loss(x, y, **multi), 55, f"fits: {NEWTON}"),
    "relative_calibration_loss": Call(
        lambda x, y, g: calibration.relative_calibration_loss(x, y, **multi), 55, f"fits: {NEWTON}"
    ),
    "expected_score": Call(lambda x, y, g: calibration.expected_score(x, y, **multi), 1, ROWS),
    "score_divergence": Call(lambda x, y, g: calibration.score_divergence(x, y, **multi), 48, f"fits: {NEWTON}"),
    "cross_val_calibrate": Call(lambda x, y, g: calibration.cross_val_calibrate(x, y, **multi), 48, f"fits: {NEWTON}"),
    "recommend": Call(
        lambda x, y, g: calibration.recommend(x, y, calibrators=[D, ISO], **multi), 120, f"fits: {NEWTON}"
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
    "report with calibrators": Call(
        lambda x, y, g: tc.report(x, y, **multi).to_dict(), 1000, f"{TABLES}; fits: {NEWTON}"
    ),
    "compare": Call(lambda x, y, g: tc.compare({"a": x, "b": 2 * x}, y, **FEW, **multi).to_dict(), 350, TABLES),
    "ReportBuilder": Call(built, 150, TABLES),
    "evaluate": Call(evaluated, 150, TABLES),
    "ByGroup.worst": Call(
        worst_groups, 16, f"{ROWS}; 4: variances of simulated counts; 4: choice of groups; 7: columns"
    ),
    "ECE.plot": Call(plotted, 18, "2: validity of the rows; 4: bands; 1: value; 11: columns of the table", "binary"),
    "Monitor": Call(monitored, 22, "2 for each of 9 metrics: validity of the rows, value; 4: bands"),
}
# Largest number of reads of a fit, with the reasons besides 2 for the rows: 1: validity, 1: presence of data
FITS = {
    "TemperatureScaling": (16, NEWTON),
    "AffineScaling": (34, f"temperature, then biases: {NEWTON}"),
    "BiasCorrection": (26, NEWTON),
    "PlattScaling": (24, NEWTON),
    "BetaCalibration": (24, NEWTON),
    "QuadraticScaling": (25, NEWTON),
    "VectorScaling": (62, "2 per Newton step: its length, and convergence"),
    "StructuredVectorScaling": (58, "2 per Newton step: its length, and convergence"),
    "StructuredMatrixScaling": (58, "2 per Newton step: its length, and convergence"),
    "DirichletCalibration": (84, "temperature, then 2 per Newton step: its length, and convergence"),
    "EnsembleTemperatureScaling": (20, f"temperature, then weights: {NEWTON}"),
    "IsotonicCalibration": (10, PAVA),
    "CentredIsotonicCalibration": (10, PAVA),
    "VennAbersCalibration": (5, "3: large counts, samples for loops on the CPU, number of knots"),
    "BayesianBinning": (4, "number of models"),
    "SplineCalibration": (4, ""),
    "HistogramBinning": (2, ""),
}


def fits():
    """Yield two calls for each calibrator: its fit, and its forward pass, which reads nothing."""
    for each in (*ALL, *OF_CLASSES):
        task = "multiclass" if "multiclass" in each.tasks else "binary"
        options, given = (binary, (ODDS, HITS)) if task == "binary" else (multi, (LOGITS, LABELS))

        def fit(x, y, g, each=each, options=options):
            return fresh(each).fit(x, y, **options).state_dict()

        def forward(x, y, g, each=each, options=options, given=given):
            return fresh(each).fit(*given, **options).to(x.device)(x)

        yield f"{name(each)}.fit", Call(fit, *FITS[name(each)], task)
        yield f"{name(each)}.forward", Call(forward, 0, "", task)


CALLS = FUNCTIONS | INFERENCE | SPECIAL | GAINS | LOSSES | REPORTS | dict(fits())


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


def test_every_public_function_is_called():
    called = {each.split("(")[0] for each in CALLS} | {case.function.__name__ for case in CASES}
    public = {
        each for module in (F, losses, calibration, inference, special) for each in module.__all__ if each[0].islower()
    }
    assert public - called == {"save_calibrator", "load_calibrator"}  # see below


def test_a_calibrator_fitted_on_the_device_is_loaded_on_the_cpu(device, tmp_path):
    calibrator = fresh(D).fit(LOGITS.to(device), LABELS.to(device), **multi)
    calibration.save_calibrator(calibrator, tmp_path / "calibrator.pt")
    loaded = calibration.load_calibrator(tmp_path / "calibrator.pt")
    expected = loaded(LOGITS)
    torch.testing.assert_close(loaded.to(device)(LOGITS.to(device)).cpu(), expected)
    torch.testing.assert_close(calibrator(LOGITS.to(device)).cpu(), expected)


@pytest.mark.filterwarnings("ignore:the fitted scale is 0")
@pytest.mark.parametrize("call", [pytest.param(c, marks=[pytest.mark.extended] * (c in SLOW)) for c in CALLS])
def test_calls_give_the_values_of_the_cpu_and_read_few_values(call, device):
    call = CALLS[call]
    given = (ODDS, HITS, GROUPS) if call.task == "binary" else (LOGITS, LABELS, GROUPS)
    expected = list(values_of(call.run(*given)))
    moved = [x.to(device) for x in given]
    with recorded_reads() as reads:
        found = call.run(*moved)
    assert reads.at_most(call.reads), f"{len(reads)} reads instead of {call.reads} ({call.why})"
    found = list(values_of(found))
    assert expected
    for mine, cpu in zip(found, expected, strict=True):
        # Fits end when a step changes their loss only by rounding, so that parameters agree to about 1e-7.
        torch.testing.assert_close(mine, cpu, rtol=1e-6, atol=1e-9, equal_nan=True)
