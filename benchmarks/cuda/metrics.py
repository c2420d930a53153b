"""Every metric, function and stream, on a GPU against float64 on the CPU.

Every function and streaming class (samples kept whole, and as a sketch), with gradients; `update` must never wait for
the device; bad rows must be raised by `compute`. The isotonic kernels must find the blocks that the CPU finds,
calibrators the optimum, and the bootstrap must draw what it draws there.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchcalib as tc
from benchmarks.cuda.check import Check, guarded, label_of, relative_error
from benchmarks.cuda.conduct import without_waiting
from torchcalib.metrics.base import StreamingMetric
from torchcalib.ops.counter_rng import random_words
from torchcalib.ops.dispatch import Backend
from torchcalib.ops.isotonic import block_ends, isotonic_regression
from torchcalib.ops.sorting import sorted_columns, tie_begins

N, N_CLASSES = 4096, 11
# Rows and elements of each for the isotonic kernels, which mark 128 blocks at once.
SHAPES = ((2, 0), (1, 1), (2, 2), (3, 127), (3, 129), (2, 4099), (1000, 1000))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Sums are float64 on both sides, so what differs is the row arithmetic, float32 on the GPU; a confidence that float32
# rounds across a bin edge moves one sample of N. Gradients come back in the dtype of the input, and carry its rounding.
VALUE_TOLERANCE = 5e-4
# Where samples are put in order, two confidences that rounding puts the other way round can move a block.
ORDER_TOLERANCE = 5e-3
SKETCH_TOLERANCE = 5e-2
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}

Function = Callable[..., Tensor]


def mcb(preds: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Miscalibration of the CORP decomposition, which is what `CORP` computes."""
    return tc.corp(preds, target, **options).mcb


def skce_linear(preds: Tensor, target: Tensor, **options: Any) -> Tensor:
    """The estimate that `SKCE` computes."""
    return tc.skce(preds, target, estimator="linear", **options)


TOP_5 = tc.TopK(5)
EPS = 1e-3


def slope(preds: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Slope of Cox's regression, which is what `Cox` computes. Half types hold probabilities of 1: they are clipped."""
    return tc.cox(preds, target, eps=EPS, **options).slope


def z_value(preds: Tensor, target: Tensor, **options: Any) -> Tensor:
    """The z of Spiegelhalter's test, which is what `Spiegelhalter` computes."""
    return tc.spiegelhalter(preds, target, **options).z


PAIRS: dict[str, tuple[Function, Callable[..., StreamingMetric[Any]]]] = {
    "nll": (tc.nll, tc.NLL),
    "brier": (tc.brier_score, tc.Brier),
    "ecd": (tc.ecd, tc.ECD),
    "bayesrisk": (tc.bayes_risk, tc.BayesRisk),
    "accuracy": (tc.accuracy, tc.Accuracy),
    "total variation": (tc.total_variation, tc.TotalVariation),
    "kl": (tc.kl_divergence, tc.KLDivergence),
    "entropy difference": (tc.entropy_difference, tc.EntropyDifference),
    "votes distance": (tc.votes_distance, tc.VotesDistance),
    "ece": (tc.ece, tc.ECE),
    "esce": (tc.esce, tc.ESCE),
    "mce": (tc.mce, tc.MCE),
    "rmsce": (tc.rmsce, tc.RMSCE),
    "ace": (tc.ace, tc.ACE),
    "tce": (tc.tce, tc.TCE),
    "ks": (tc.ks, tc.KS),
    "corp": (mcb, tc.CORP),
    "skce": (skce_linear, tc.SKCE),
    "ici": (tc.ici, tc.ICI),
    "cox": (slope, partial(tc.Cox, eps=EPS)),
    "smece": (tc.smece, tc.SmECE),
    "spiegelhalter": (z_value, tc.Spiegelhalter),
}
ORDERED = ("ace", "tce", "ks", "corp", "ici", "cox")
VOTES = ("total variation", "kl", "entropy difference", "votes distance")
SCORES = ("nll", "brier", "ecd", "bayesrisk", "accuracy", "skce", *VOTES)


def settings() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Every metric in every task and reduction: name, metric, options of both, options of the class alone."""
    for metric in PAIRS:
        for task in ("binary", "multiclass", "multilabel"):
            own = {"multiclass": {"num_classes": N_CLASSES}, "multilabel": {"num_labels": N_CLASSES}}.get(task, {})
            for from_logits in (False, True):
                options = {"task": task, "from_logits": from_logits}
                kind = "logits" if from_logits else "probs"
                if metric in SCORES:
                    yield f"{metric} {task} {kind}", metric, options, own
                    continue
                offered = {"binary": ("positive_class", "top_label"), "multiclass": ("top_label", "classwise", TOP_5)}
                for reduction in offered.get(task, ("classwise",)):
                    yield f"{metric} {task} {reduction} {kind}", metric, {**options, "reduction": reduction}, own
    for metric in ("nll", "brier", "bayesrisk"):
        options = {"task": "multiclass", "from_logits": True, "normalize": "prior"}
        yield f"{metric} multiclass normalised", metric, options, {"num_classes": N_CLASSES}


def sample(task: str, from_logits: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Predictions, rounded to `dtype`, and targets on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shape = (N,) if task == "binary" else (N, N_CLASSES)
    logits = 2 * torch.randn(shape, generator=generator)
    high = N_CLASSES if task == "multiclass" else 2
    target = torch.randint(0, high, shape if task == "multilabel" else (N,), generator=generator)
    if not from_logits:
        logits = logits.softmax(-1) if task == "multiclass" else logits.sigmoid()
    return logits.to(dtype), target


def on_gpu_without_waiting(
    metric: StreamingMetric[Any] | tc.CalibrationCollection, preds: Tensor, target: Tensor
) -> None:
    """Update twice while every synchronisation with the host is an error."""
    metric.update(preds, target)  # the first call may set up kernels
    with without_waiting(preds.device):
        metric.update(preds, target)


def check_setting(
    device: torch.device, name: str, metric: str, options: dict[str, Any], own: dict[str, Any], dtype: torch.dtype
) -> Iterator[Check]:
    """Value, gradient and stream of one metric in one setting."""
    function, cls = PAIRS[metric]
    preds, target = sample(options["task"], options["from_logits"], dtype)
    label = label_of(dtype)
    # Rounded half probabilities are taken as they are on both sides.
    reference = preds.double().requires_grad_()
    expected = function(reference, target, validate_args=False, **options)
    gpu = preds.to(device).requires_grad_()
    value = function(gpu, target.to(device), **options)
    tolerance = ORDER_TOLERANCE if metric in ORDERED else VALUE_TOLERANCE
    yield Check(name, label, "value", relative_error(value, expected), tolerance)
    stream = cls(**options, **own).to(device)
    if stream.is_differentiable:
        expected.backward()  # type: ignore[no-untyped-call]
        value.backward()  # type: ignore[no-untyped-call]
        assert gpu.grad is not None
        assert reference.grad is not None
        yield Check(
            name, label, "gradient", relative_error(gpu.grad, reference.grad, 0.1 / N), GRADIENT_TOLERANCE[dtype]
        )
    # The stream has seen the batch twice, which doubles every block and sharpens the test of TCE.
    doubled = preds.double().repeat(2, *[1] * (preds.dim() - 1)), torch.cat((target, target))
    twice = function(*doubled, validate_args=False, **options)
    on_gpu_without_waiting(stream, gpu.detach(), target.to(device))
    yield Check(name, label, "stream, no host sync", relative_error(stream.compute(), twice), tolerance)
    if metric in ORDERED:
        sketch = cls(**options, **own, resolution=2048).to(device)
        on_gpu_without_waiting(sketch, gpu.detach(), target.to(device))
        yield Check(name, label, "sketch, no host sync", relative_error(sketch.compute(), twice), SKETCH_TOLERANCE)


def check_bad_rows(device: torch.device) -> Iterator[Check]:
    """Bad rows on the GPU are counted without waiting, kept out of the sums, and raised by `compute`."""
    good, y = torch.tensor([0.2, 0.7, 0.9], device=device), torch.tensor([0, 1, 1], device=device)
    spoiled = {
        "NaN": (torch.tensor([0.2, 0.7, 0.9, torch.nan]), torch.tensor([0, 1, 1, 0])),
        "range": (torch.tensor([0.2, 0.7, 0.9, 1.5]), torch.tensor([0, 1, 1, 0])),
        "label": (torch.tensor([0.2, 0.7, 0.9, 0.5]), torch.tensor([0, 1, 1, 7])),
    }
    for kind, (preds, target) in spoiled.items():
        metric = tc.ECE(task="binary").to(device)
        on_gpu_without_waiting(metric, preds.to(device), target.to(device))
        clean = tc.ECE(task="binary").to(device)
        clean.update(good, y)
        clean.update(good, y)
        yield Check(
            f"bad rows: {kind}", "float32", "kept out of the sums", relative_error(metric.state[2:], clean.state[2:]), 0
        )
        try:
            metric.compute()
            raised = False
        except ValueError as error:
            raised = "got 2 with NaN" in str(error)
        yield Check(f"bad rows: {kind}", "float32", "raised by compute", 0.0 if raised else 1.0, 0)


def check_collection(device: torch.device) -> Iterator[Check]:
    """A whole collection updates without waiting."""
    members = {
        name: cls(task="multiclass", num_classes=N_CLASSES, from_logits=True) for name, (_, cls) in PAIRS.items()
    }
    preds, target = sample("multiclass", True, torch.float32)
    metrics = tc.CalibrationCollection(members).to(device)
    on_gpu_without_waiting(metrics, preds.to(device), target.to(device))
    for name, value in metrics.compute().items():
        function = PAIRS[name][0]
        expected = function(preds.double().repeat(2, 1), target.repeat(2), task="multiclass", from_logits=True)
        tolerance = ORDER_TOLERANCE if name in ORDERED else VALUE_TOLERANCE
        yield Check(f"collection: {name}", "float32", "value", relative_error(value, expected), tolerance)


def check_blocks(device: torch.device, name: str, rows: int, length: int) -> Iterator[Check]:
    """Blocks of counts, all scores distinct and tied, samples of weight 0 and a row without data among them."""
    backend: Backend = "triton" if device.type == "cuda" else "auto"
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(rows, length, generator=generator, dtype=torch.float64)
    outcomes = (torch.rand(rows, length, generator=generator) < scores).long()
    weights = torch.randint(0, 4, (rows, length), generator=generator)
    weights[:, :1] = 3  # PAVA-BC needs more than one sample in a row
    weights[1:2] = 0
    steps: dict[str, Callable[..., Tensor]] = {
        "pava": partial(block_ends, "pava"),
        "pava_bc code": partial(block_ends, "pava_bc"),
        "pava_bc paper": partial(block_ends, "pava_bc", variant="paper"),
    }
    for kind, given in (("distinct", scores), ("tied", (20 * scores).floor())):
        score, positives, n, _ = sorted_columns(given.masked_fill(weights == 0, torch.nan), weights * outcomes, weights)
        assert n is not None
        columns = tie_begins(score), positives, n
        for what, step in steps.items():
            expected, found = step(*columns), step(*(column.to(device) for column in columns), backend=backend)
            yield Check(name, "int64", f"{what}, {kind}", float(not torch.equal(found.cpu(), expected)), 0)


def check_isotonic_regression(device: torch.device, name: str, rows: int, length: int) -> Iterator[Check]:
    """Fit and gradient of real targets, weights of 0 among them, without waiting for the device."""
    backend: Backend = "triton" if device.type == "cuda" else "auto"
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(rows, length, generator=generator, dtype=torch.float64) + torch.linspace(0, 3, length)
    w = (torch.rand(rows, length, generator=generator, dtype=torch.float64) - 0.2).clamp(min=0)
    w[:, :1] = 1
    slope = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    reference, gpu = y.clone().requires_grad_(), y.to(device).requires_grad_()
    expected = isotonic_regression(reference, w)
    expected.backward(slope)  # type: ignore[no-untyped-call]
    w_gpu, slope_gpu = w.to(device), slope.to(device)
    isotonic_regression(gpu, w_gpu, backend=backend)  # the first call compiles
    with without_waiting(gpu.device):
        found = isotonic_regression(gpu, w_gpu, backend=backend)
    found.backward(slope_gpu)  # type: ignore[no-untyped-call]
    yield Check(name, "float64", "fit, no host sync", relative_error(found, expected), 1e-12)
    assert gpu.grad is not None
    assert reference.grad is not None
    yield Check(name, "float64", "gradient of the fit", relative_error(gpu.grad, reference.grad), 1e-12)


def check_calibrators(device: torch.device, from_logits: bool) -> Iterator[Check]:
    """Fits reach the optimum that they reach on the CPU, and so does the cross-validated loss on the same folds."""
    preds, target = sample("multiclass", from_logits, torch.float64)
    options: dict[str, Any] = {"task": "multiclass", "from_logits": from_logits}
    name = f"calibrators {'logits' if from_logits else 'probs'}"
    for calibrator in (tc.Temperature(), tc.DPCalibration()):
        what = type(calibrator).__name__
        here = calibrator.fit(preds, target, **options)
        there = calibrator.fit(preds.to(device), target.to(device), **options)
        yield Check(name, "float64", f"{what} scale", relative_error(there.alpha, here.alpha), 1e-8)
        yield Check(name, "float64", f"{what} gradient", float(there.grad_norm.max()), 1e-9)
        loss = tc.calibration_loss(preds, target, calibrator=calibrator, **options)
        on_gpu = tc.calibration_loss(preds.to(device), target.to(device), calibrator=calibrator, **options)
        yield Check(name, "float64", f"{what} loss", relative_error(on_gpu, loss), 1e-8)


def check_bootstrap(device: torch.device) -> Iterator[Check]:
    """Draws are those of the CPU, bit for bit; intervals of functions, of a calibration loss, and streamed."""
    streams, counters = torch.arange(40), torch.arange(1000)
    words = random_words(7, streams.to(device), counters.to(device)).cpu()
    yield Check("bootstrap", "int64", "words", int((words != random_words(7, streams, counters)).sum()), 0)
    preds, target = sample("multiclass", True, torch.float64)
    options: dict[str, Any] = {"task": "multiclass", "from_logits": True, "n_replicates": 40}
    for function in (tc.nll, tc.ece, tc.ks, tc.rcl):
        expected = tc.bootstrap(function, preds, target, **options).replicates
        found = tc.bootstrap(function, preds.to(device), target.to(device), **options).replicates
        tolerance = 1e-8 if function is tc.rcl else VALUE_TOLERANCE
        yield Check("bootstrap", "float64", function.__name__, relative_error(found, expected), tolerance)
    here = tc.Bootstrapped(tc.ECE(task="multiclass", from_logits=True), n_replicates=40)
    there = deepcopy(here).to(device)
    here.update(preds, target)
    here.update(preds, target)
    on_gpu_without_waiting(there, preds.to(device), target.to(device))
    error = relative_error(there.interval().replicates, here.interval().replicates)
    yield Check("bootstrap", "float64", "stream, no host sync", error, VALUE_TOLERANCE)


def metrics(device: torch.device) -> Iterator[Check]:
    """Do all checks."""
    for dtype in DTYPES:
        for name, metric, options, own in settings():
            work = partial(check_setting, device, name, metric, options, own, dtype)
            yield from guarded(name, label_of(dtype), work)
    yield from guarded("bad rows", "float32", partial(check_bad_rows, device))
    yield from guarded("collection", "float32", partial(check_collection, device))
    for from_logits in (False, True):
        yield from guarded("calibrators", "float64", partial(check_calibrators, device, from_logits))
    yield from guarded("bootstrap", "float64", partial(check_bootstrap, device))
    for rows, length in SHAPES:
        name = f"isotonic kernels {rows} x {length}"
        yield from guarded(name, "int64", partial(check_blocks, device, name, rows, length))
        yield from guarded(name, "float64", partial(check_isotonic_regression, device, name, rows, length))
