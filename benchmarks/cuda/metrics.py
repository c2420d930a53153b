"""Every function and streaming class on a GPU, compared with float64 on the CPU.

Values and gradients; samples stored exactly and as a sketch; updates without synchronisation; invalid rows, which
`compute` must report; calibrators and the bootstrap. Tests marked `cuda` check the isotonic kernels.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import torchcalib as tc
import torchcalib.functional as F
from benchmarks.cuda.behaviour import forbid_synchronisation
from benchmarks.cuda.check import Check, guarded, label_of, relative_error
from torchcalib.calibration import AffineScaling, TemperatureScaling, calibration_loss, relative_calibration_loss
from torchcalib.inference import bootstrap
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.ops.counter_rng import random_words

N, N_CLASSES = 4096, 11
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Both devices sum in float64. Only the row arithmetic differs: float32 on the GPU. A confidence that float32 rounds
# across a bin edge moves one of N samples. Gradients have the dtype of the input, and its rounding.
VALUE_TOLERANCE = 5e-4
# If rounding swaps two confidences, a block of sorted samples may end at another sample.
ORDER_TOLERANCE = 5e-3
SKETCH_TOLERANCE = 5e-2
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
TOP_5 = tc.TopK(5)
EPS = 1e-3  # half types round probabilities to 1, which Cox's regression must clip

Metric = type[CalibrationMetric[Any]]
VOTES: tuple[Metric, ...] = (tc.TotalVariation, tc.KLDivergence, tc.EntropyGap, tc.SquaredDistance)
SCORES: tuple[Metric, ...] = (tc.NLL, tc.BrierScore, tc.ECD, tc.BayesRisk, tc.Accuracy, tc.SKCE, *VOTES)
ORDERED: tuple[Metric, ...] = (tc.ACE, tc.TCE, tc.KS, tc.CORP, tc.ICI, tc.Cox)
OF_EVENTS: tuple[Metric, ...] = (tc.ECE, tc.ESCE, tc.MCE, tc.RMSCE, tc.SmECE, tc.Spiegelhalter, *ORDERED)
COMPONENTS: dict[Metric, str] = {tc.CORP: "mcb", tc.Cox: "slope"}
"""Components of results that have several."""
MODES = {"binary": ("positive", "top_label"), "multiclass": ("top_label", "classwise", TOP_5)}


def function_of(cls: Metric, preds: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Return the value of the function of a class."""
    fixed = {"estimator": "linear"} if cls is tc.SKCE else {}
    found: Any = cls.function(preds, target, **fixed, **options)
    return getattr(found, COMPONENTS[cls]) if cls in COMPONENTS else found  # type: ignore[no-any-return]


def settings() -> Iterator[tuple[str, Metric, dict[str, Any], dict[str, Any]]]:
    """Yield every metric in every task and mode: (name, class, options, options of the class only)."""
    for cls, task, from_logits in product((*SCORES, *OF_EVENTS), ("binary", "multiclass", "multilabel"), (False, True)):
        own = {"multiclass": {"num_classes": N_CLASSES}, "multilabel": {"num_labels": N_CLASSES}}.get(task, {})
        options = {"task": task, "from_logits": from_logits} | ({"eps": EPS} if cls is tc.Cox else {})
        kind = "logits" if from_logits else "probs"
        if cls in SCORES:
            yield f"{cls.key} {task} {kind}", cls, options, own
            continue
        for mode in MODES.get(task, ("classwise",)):
            yield f"{cls.key} {task} {mode} {kind}", cls, {**options, "mode": mode}, own
    for cls in (tc.NLL, tc.BrierScore, tc.BayesRisk):
        options = {"task": "multiclass", "from_logits": True, "normalize": "prior"}
        yield f"{cls.key} multiclass normalised", cls, options, {"num_classes": N_CLASSES}


def sample(task: str, from_logits: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return predictions, rounded to `dtype`, and targets on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shape = (N,) if task == "binary" else (N, N_CLASSES)
    logits = 2 * torch.randn(shape, generator=generator)
    high = N_CLASSES if task == "multiclass" else 2
    target = torch.randint(0, high, shape if task == "multilabel" else (N,), generator=generator)
    if not from_logits:
        logits = logits.softmax(-1) if task == "multiclass" else logits.sigmoid()
    return logits.to(dtype), target


def update_twice(metric: CalibrationMetric[Any], preds: Tensor, target: Tensor) -> None:
    """Update twice, the second time with synchronisation forbidden."""
    metric.update(preds, target)  # compiles kernels
    with forbid_synchronisation(preds.device):
        metric.update(preds, target)


def check_setting(
    device: torch.device, name: str, cls: Metric, options: dict[str, Any], own: dict[str, Any], dtype: torch.dtype
) -> Iterator[Check]:
    """Check value, gradient and stream of one metric in one setting."""
    function = partial(function_of, cls)
    preds, target = sample(options["task"], options["from_logits"], dtype)
    label = label_of(dtype)
    # Half-precision probabilities do not sum to 1, so that neither device validates them.
    reference = preds.double().requires_grad_()
    expected = function(reference, target, validate_args=False, **options)
    gpu = preds.to(device).requires_grad_()
    value = function(gpu, target.to(device), **options)
    tolerance = ORDER_TOLERANCE if cls in ORDERED else VALUE_TOLERANCE
    yield Check(name, label, "value", relative_error(value, expected), tolerance)
    stream = cls(**options, **own).to(device)
    if stream.is_differentiable:
        expected.sum().backward()  # type: ignore[no-untyped-call]
        value.sum().backward()  # type: ignore[no-untyped-call]
        assert gpu.grad is not None
        assert reference.grad is not None
        rows = torch.ones(len(preds), dtype=torch.bool)
        tolerance_of_gradient = GRADIENT_TOLERANCE[dtype]
        if options.get("mode") is TOP_5:
            # Any of the entries with equal rank can have the gradient of that rank. A gradient in logits is the sum of
            # two gradients of opposite sign, and autograd rounds both to the dtype of the input.
            rows = preds.double().sort(-1).values.diff().ne(0).all(-1)
            tolerance_of_gradient *= 4
        error = relative_error(gpu.grad.cpu()[rows], reference.grad[rows], 0.1 / N)
        yield Check(name, label, "gradient", error, tolerance_of_gradient)
    # The stream has two copies of the batch, which doubles every block and increases the power of the test of TCE.
    doubled = preds.double().repeat(2, *[1] * (preds.dim() - 1)), torch.cat((target, target))
    twice = function(*doubled, validate_args=False, **options)
    update_twice(stream, gpu.detach(), target.to(device))
    yield Check(name, label, "stream, no host sync", relative_error(stream.compute(), twice), tolerance)
    if cls in ORDERED:
        sketch = cls(**options, **own, resolution=2048).to(device)
        update_twice(sketch, gpu.detach(), target.to(device))
        yield Check(name, label, "sketch, no host sync", relative_error(sketch.compute(), twice), SKETCH_TOLERANCE)


def check_bad_rows(device: torch.device) -> Iterator[Check]:
    """Check that invalid rows on the GPU are counted without synchronisation, excluded from sums and reported."""
    good, y = torch.tensor([0.2, 0.7, 0.9], device=device), torch.tensor([0, 1, 1], device=device)
    spoiled = {
        "NaN": (torch.tensor([0.2, 0.7, 0.9, torch.nan]), torch.tensor([0, 1, 1, 0])),
        "range": (torch.tensor([0.2, 0.7, 0.9, 1.5]), torch.tensor([0, 1, 1, 0])),
        "label": (torch.tensor([0.2, 0.7, 0.9, 0.5]), torch.tensor([0, 1, 1, 7])),
    }
    for kind, (preds, target) in spoiled.items():
        metric = tc.ECE(task="binary").to(device)
        update_twice(metric, preds.to(device), target.to(device))
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


def check_calibrators(device: torch.device, from_logits: bool) -> Iterator[Check]:
    """Check that fits and cross-validated losses on the same folds equal those on the CPU."""
    preds, target = sample("multiclass", from_logits, torch.float64)
    options: dict[str, Any] = {"task": "multiclass", "from_logits": from_logits}
    name = f"calibrators {'logits' if from_logits else 'probs'}"
    for method in (TemperatureScaling, AffineScaling):
        what = method.__name__
        here = method().fit(preds, target, **options)
        there = method().fit(preds.to(device), target.to(device), **options)
        yield Check(name, "float64", f"{what} scale", relative_error(there.alpha, here.alpha), 1e-8)
        yield Check(name, "float64", f"{what} gradient", float(there.grad_norm.max()), 1e-9)
        loss = calibration_loss(preds, target, calibrator=method(), **options)
        on_gpu = calibration_loss(preds.to(device), target.to(device), calibrator=method(), **options)
        yield Check(name, "float64", f"{what} loss", relative_error(on_gpu, loss), 1e-8)


def check_bootstrap(device: torch.device) -> Iterator[Check]:
    """Check that random draws equal those on the CPU exactly, and intervals within rounding."""
    streams, counters = torch.arange(40), torch.arange(1000)
    words = random_words(7, streams.to(device), counters.to(device)).cpu()
    yield Check("bootstrap", "int64", "words", int((words != random_words(7, streams, counters)).sum()), 0)
    preds, target = sample("multiclass", True, torch.float64)
    options: dict[str, Any] = {"task": "multiclass", "from_logits": True, "n_replicates": 40}
    for function in (F.nll, F.ece, F.ks, relative_calibration_loss):
        expected = bootstrap(function, preds, target, **options).replicates
        found = bootstrap(function, preds.to(device), target.to(device), **options).replicates
        tolerance = 1e-8 if function is relative_calibration_loss else VALUE_TOLERANCE
        yield Check("bootstrap", "float64", function.__name__, relative_error(found, expected), tolerance)
    here = tc.Bootstrapped(tc.ECE(task="multiclass", from_logits=True), n_replicates=40)
    there = deepcopy(here).to(device)
    here.update(preds, target)
    here.update(preds, target)
    update_twice(there, preds.to(device), target.to(device))
    error = relative_error(there.interval().replicates, here.interval().replicates)
    yield Check("bootstrap", "float64", "stream, no host sync", error, VALUE_TOLERANCE)


def metrics(device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Check]:
    for dtype in dtypes:
        for name, cls, options, own in settings():
            work = partial(check_setting, device, name, cls, options, own, dtype)
            yield from guarded(name, label_of(dtype), work)


def fits(device: torch.device) -> Iterator[Check]:
    """Check invalid rows, calibrators and the bootstrap."""
    yield from guarded("bad rows", "float32", partial(check_bad_rows, device))
    for from_logits in (False, True):
        yield from guarded("calibrators", "float64", partial(check_calibrators, device, from_logits))
    yield from guarded("bootstrap", "float64", partial(check_bootstrap, device))
