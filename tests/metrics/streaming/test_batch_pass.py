"""The pass over a batch of labels on the CPU, compared with the conversion of the same batch."""

import os
import subprocess
import sys

import pytest
import torch
from helpers.products import each_value

import torchcalib as tc
from torchcalib.core import pieces as core_pieces
from torchcalib.functional import estimator
from torchcalib.metrics import base, collection
from torchcalib.ops.threads import in_threads

METRICS = (tc.ECE, tc.ESCE, tc.MCE, tc.RMSCE, tc.NLL, tc.BrierScore, tc.ECD, tc.Accuracy)
SHAPES = {"rows": (70,), "items": (6, 3, 4), "large items": (3, 40, 2)}
CASES = ("binary", "binary logits", "last axis", "first axis", "classwise", "classwise logits")
COLUMNS = ("labels", "ignored", "weights", "copies", "ignored weights")


def batch(task, from_logits, dtype, n=70, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((n,) if task == "binary" else (n, 7), generator=generator)
    target = torch.randint(2 if task == "binary" else 7, (n,), generator=generator)
    preds = logits if from_logits else logits.sigmoid() if task == "binary" else logits.softmax(-1)
    return preds.to(dtype), target


def options_of(task, from_logits):
    return {"task": task, "from_logits": from_logits, **({"num_classes": 7} if task == "multiclass" else {})}


def columns_of(kind, preds, target, seed=0):
    """Return predictions, labels and weights. Rows that are ignored or have weight 0 are NaN."""
    g = torch.Generator().manual_seed(seed)
    preds, target, absent = preds.clone(), target.clone(), torch.rand(target.shape, generator=g) < 0.2
    weights = None
    if "weights" in kind:
        weights = torch.rand(target.shape, generator=g).masked_fill(absent, 0)
    if kind == "copies":
        weights = torch.randint(1, 4, target.shape, generator=g).masked_fill(absent, 0)
    if "ignored" in kind:
        target = target.masked_fill(torch.rand(target.shape, generator=g) < 0.3, -100)
    if weights is not None:
        preds[absent] = torch.nan
    return preds, target, weights


def with_axis(preds, target, weights, shape, class_first):
    """Return rows with the axes `shape` of samples, and the class axis first or last."""
    if preds.dim() == 2:
        preds = preds.reshape(*shape, -1)
        preds = preds.movedim(-1, 1).contiguous() if class_first else preds
    else:
        preds = preds.reshape(shape)
    return preds, target.reshape(shape), None if weights is None else weights.reshape(shape)


@pytest.fixture
def pieces(monkeypatch):
    """Divide batches into pieces of few rows, with sums of their own. Classes are columns from 8 rows on."""
    monkeypatch.setattr(core_pieces, "_ROWS", 16)
    monkeypatch.setattr(core_pieces, "_PER_PART", 2)
    monkeypatch.setattr(core_pieces, "_LARGE_ITEM", 8)
    monkeypatch.setattr(core_pieces, "_TOGETHER", 16)
    monkeypatch.setattr(core_pieces, "_FEWEST", 8)
    monkeypatch.setattr(core_pieces, "_CHUNKS", 3)


@pytest.fixture
def converted(monkeypatch):
    """Return a function after whose call all batches are converted by `InputFormat.read`."""

    def convert():
        for module in (base, collection, estimator):
            monkeypatch.setattr(module, "rows_of", lambda *_: None)

    return convert


def assert_equal_states(found, expected, rtol=1e-12):
    for x, y in zip(found._parts().values(), expected._parts().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("value", [-0.5, 1.5, torch.nan])
@pytest.mark.parametrize("place", ["sum", "class", "label"])
def test_invalid_rows_of_class_columns_are_found(place, value, pieces):
    preds, target = batch("multiclass", False, torch.float32)
    if place == "label":
        target[-1] = 7
    else:
        preds[-1, 0] = value
        preds[-1, 1] += 0 if place == "sum" else 1 - preds[-1].sum()
    metric = tc.ECE(**options_of("multiclass", False), mode="classwise")
    with pytest.raises(ValueError, match="`target`" if place == "label" else "`preds`"):
        metric.update(preds, target)
    assert metric.state.sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_states_of_short_floats_equal_those_of_converted_batches(task, from_logits, dtype, converted):
    options = options_of(task, from_logits)
    given = [batch(task, from_logits, dtype, seed=seed) for seed in range(2)]
    here = {cls.__name__: cls(**options) for cls in METRICS}
    together = tc.CalibrationCollection({name: cls(**options) for name, cls in zip(here, METRICS, strict=True)})
    there = {cls.__name__: cls(**options) for cls in METRICS}
    for preds, target in given:
        together.update(preds, target)
        for metric in here.values():
            metric.update(preds, target)
    converted()
    for preds, target in given:
        for metric in there.values():
            metric.update(preds, target)
    for name, metric in there.items():
        assert_equal_states(here[name], metric)
        # A metric alone needs fewer statistics of rows, whose pass may round float32 numbers differently.
        torch.testing.assert_close(together[name].state, metric.state, rtol=2e-6, atol=1e-12)
        torch.testing.assert_close(here[name].compute(), metric.compute(), rtol=1e-6, atol=0)


@each_value(case=CASES, kind=COLUMNS, shape=list(SHAPES))
def test_states_with_columns_equal_those_of_converted_batches(case, kind, shape, pieces, converted):
    task, samples = "binary" if "binary" in case else "multiclass", SHAPES[shape]
    n = torch.Size(samples).numel()
    preds, target = batch(task, "logits" in case, torch.float64, n)
    preds, target, weights = with_axis(*columns_of(kind, preds, target), samples, case == "first axis")
    options = options_of(task, "logits" in case)
    if "ignored" in kind:
        options["ignore_index"] = -100
    if task == "multiclass" and len(samples) > 1:
        options["class_axis"] = 1 if case == "first axis" else -1
    modes = {"mode": "classwise"} if "classwise" in case else {}
    metrics = [cls(**options, **(modes if cls is tc.ECE else {})) for cls in METRICS]
    here, there = [m.clone() for m in metrics], [m.clone() for m in metrics]
    together = tc.CalibrationCollection(dict(zip(map(str, range(len(metrics))), metrics, strict=True)))
    for metric in here:
        metric.update(preds, target, weights)
    together.update(preds, target, weights)
    converted()
    for k, metric in enumerate(there):
        metric.update(preds, target, weights)
        assert_equal_states(here[k], metric)
        torch.testing.assert_close(together[str(k)].state, metric.state, rtol=1e-12, atol=1e-12)


@each_value(case=["binary", "top label", "classwise"], kind=COLUMNS, keys=["rows", "runs", "items", "none", "large"])
def test_states_of_parts_equal_those_of_converted_batches(case, kind, keys, pieces, converted):
    task = "binary" if case == "binary" else "multiclass"
    preds, target = batch(task, False, torch.float64, 72)
    preds, target, weights = with_axis(*columns_of(kind, preds, target), (6, 3, 4), False)
    options = options_of(task, False) | ({"class_axis": -1} if task == "multiclass" else {})
    if "ignored" in kind:
        options["ignore_index"] = -100
    generator = torch.Generator().manual_seed(1)
    groups = {
        "rows": torch.randint(5, (6, 3, 4), generator=generator),
        "runs": torch.arange(72).reshape(6, 3, 4) // 20,
        "items": torch.arange(6)[:, None, None].expand(6, 3, 4) % 5,
        "none": torch.randint(-1, 5, (6, 3, 4), generator=generator),
        "large": torch.randint(5, (6, 3, 4), generator=generator),
    }[keys]
    clusters = groups[:, 0, 0] if keys == "items" else groups * (10**15 if keys == "large" else 1)
    mode = {"mode": "classwise"} if case == "classwise" else {}
    metrics = [tc.ECE(**options, **mode), tc.NLL(**options), tc.BrierScore(**options)]
    states = []
    for convert in (False, True):
        if convert:
            converted()
        by_group = [tc.ByGroup(m, num_groups=5) for m in metrics]
        clustered = [tc.Clustered(m) for m in metrics]
        for metric in by_group:
            metric.update(preds, target, weights, groups=groups)
        for metric in clustered:
            metric.update(preds, target, weights, clusters=clusters)
        states.append([*by_group, *clustered])
    for found, expected in zip(*states, strict=True):
        assert_equal_states(found, expected)


@pytest.mark.parametrize("bad", ["row", "label", "weight", "group"])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_invalid_values_in_any_piece_change_nothing(task, bad, pieces):
    preds, target = batch(task, False, torch.float64)
    weights, groups = torch.ones(70), torch.zeros(70, dtype=torch.int64)
    column = {"row": preds, "label": target, "weight": weights, "group": groups}[bad]
    column[50] = 9 if column.dtype == torch.int64 else -1
    metric = tc.ByGroup(tc.ECE(**options_of(task, False)), num_groups=2)
    metric.update(*batch(task, False, torch.float64), groups=torch.ones(70, dtype=torch.int64))
    before = metric.state.clone()
    with pytest.raises(ValueError, match=r"must be|must have"):
        metric.update(preds, target, weights, groups=groups)
    assert torch.equal(metric.state, before)
    assert metric.update_count == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32])
def test_labels_of_any_dtype(dtype, converted):
    task = "binary" if dtype == torch.bool else "multiclass"
    preds, target = batch(task, False, torch.float32)
    found = tc.nll(preds, target.to(dtype), task=task)
    converted()
    torch.testing.assert_close(found, tc.nll(preds, target, task=task))


def test_other_input_is_converted():
    preds, target = batch("multiclass", from_logits=True, dtype=torch.float32)
    how = tc.ECE(task="multiclass", from_logits=True).input_format
    others = [
        (preds[:0], target[:0]),
        (preds.requires_grad_(), target),
        (preds.detach(), target.float()),
        (torch.rand_like(preds.detach()), target),  # may be probabilities
        (torch.complex(preds.detach(), preds.detach()).conj().imag, target),  # negated memory
        (preds.detach(), target, torch.ones(2, 70)),  # replicates
        (preds.detach(), target, torch.ones(70, requires_grad=True)),
    ]
    for given in others:
        assert core_pieces.rows_of(how, *given) is None
    for options in ({"nan_policy": "drop"}, {"positive_classes": [1]}, {"class_axis": 0}):
        how = tc.ECE(task="multiclass", from_logits=True, **options).input_format
        assert core_pieces.rows_of(how, preds.detach(), target) is None
    with torch.no_grad():
        found = torch.func.vmap(lambda x: tc.functional.ece(x, target, task="multiclass", from_logits=True))(
            preds.detach().expand(2, -1, -1)
        )
    assert found.shape == (2,)


@pytest.mark.parametrize("metric", [tc.ECE, tc.NLL, tc.BrierScore])
def test_rows_that_need_no_copy_are_added_in_large_pieces(pieces, monkeypatch, metric):
    monkeypatch.setattr("torchcalib.ops.dispatch.RULE", "always")
    preds, target = batch("binary", False, torch.float32)
    whole, copied = metric(task="binary"), metric(task="binary")
    whole.update(preds, target)
    copied.update(torch.stack((preds, preds), 1)[:, 0], target)
    torch.testing.assert_close(whole.state, copied.state, rtol=1e-12, atol=0)
    preds[50] = 2
    with pytest.raises(ValueError, match="preds"):
        whole.update(preds, target)
    torch.testing.assert_close(whole.state, copied.state, rtol=1e-12, atol=0)


def test_work_of_threads_may_use_threads(monkeypatch):
    monkeypatch.setattr("torchcalib.ops.threads.n_threads", lambda: 2)
    done = []
    in_threads(lambda begin, end: in_threads(lambda b, e: done.extend(range(b, e)), 4, 8, 1), 4, 8, 1)
    assert sorted(done) == sorted(4 * list(range(4)))


MEGABYTES = """
import resource
import torch
import torchcalib as tc

torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
shape = 4, 2, 96, 96, 64
preds = torch.rand(shape, generator=g)
preds[:, 0].copy_(preds[:, 1]).neg_().add_(1)
target, weights = torch.empty(4, 96, 96, 64, dtype=torch.uint8).random_(0, 2, generator=g), torch.rand(4, 96, 96, 64)
how = {"task": "multiclass", "num_classes": 2, "class_axis": 1}
metrics = [
    tc.ECE(**how), tc.ECE(mode="classwise", **how), tc.ECE(ignore_index=0, **how), tc.ECE(nan_policy="drop", **how),
    tc.ECE(mode=tc.TopK(2), **how), tc.ECE(positive_classes=[1], **how), tc.ECD(**how), tc.NLL(**how),
]
clustered = [tc.Clustered(tc.ECE(**how)), tc.Clustered(tc.ECE(mode="classwise", **how))]
for k, metric in enumerate([*metrics, *metrics[:2], *clustered]):
    update = metric.update
    columns = {"weights": weights} if k in (8, 9) else {"clusters": torch.arange(4)} if k > 9 else {}
    small = {name: column[:1] if name == "clusters" else column[:1, :2] for name, column in columns.items()}
    update(preds[:1, :, :2], target[:1, :2], **small)  # imports and compiles
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    update(preds, target, **columns)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of the peak memory is that of Linux")
@pytest.mark.parametrize("loops", ["never", pytest.param("always", marks=pytest.mark.extended)])
def test_memory_of_an_update_is_that_of_a_piece(loops):
    environment = {**os.environ, "TORCHCALIB_NUMBA": loops}
    command = [sys.executable, "-c", MEGABYTES]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    megabytes = list(map(int, found.stdout.split()))
    assert len(megabytes) == 12
    assert max(megabytes) <= 64, megabytes


@pytest.mark.parametrize("kind", ["labels", "ignored weights", "shares"])
@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_large_batches_that_are_converted_in_pieces(task, kind, monkeypatch):
    preds, target = batch("multiclass" if task != "binary" else task, False, torch.float64, 72)
    preds, target, weights = with_axis(*columns_of(kind, preds, target), (6, 3, 4), task != "binary")
    if task == "multilabel":
        target = torch.randint(2, preds.shape)
    if kind == "shares":
        target = torch.rand(preds.shape, generator=torch.Generator().manual_seed(1), dtype=preds.dtype)
        target = target / target.sum(1, True) if task == "multiclass" else target
    how = {"task": task} | ({} if task == "binary" else {"class_axis": 1})
    how |= {"ignore_index": -100} if "ignored" in kind else {}
    sizes = {} if task == "binary" else {"num_labels" if task == "multilabel" else "num_classes": 7}
    functions = (tc.ece, tc.nll, tc.brier_score, tc.ecd)
    metrics = [cls(**how, **sizes) for cls in (tc.ECE, tc.NLL, tc.BrierScore, tc.ECD)]
    groups = torch.arange(6)[:, None, None].expand(6, 3, 4) % 3
    found = []
    for large in (0, 2**20):
        monkeypatch.setattr(core_pieces, "_LARGE", large)
        monkeypatch.setattr(core_pieces, "_CONVERTED", 50)
        states = [metric.clone() for metric in metrics]
        by_group = [tc.ByGroup(metric, num_groups=3) for metric in metrics]
        for metric in states:
            metric.update(preds, target, weights)
        for metric in by_group:
            metric.update(preds, target, weights, groups=groups)
        values = [function(preds, target, **how, weights=weights) for function in functions]
        found.append([*values, *(m.state for m in (*states, *by_group))])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_tiny_floating_weights_after_counts_set_the_flag_of_the_noise():
    metric = tc.ECE(task="binary")
    metric.update(torch.full((1000,), 0.31), torch.zeros(1000, dtype=torch.long))
    assert metric.kind.of_batch(metric.state).noise_flag == 0
    metric.update(torch.tensor([0.82]), torch.tensor([1]), torch.tensor([1e-20]))
    assert metric.kind.of_batch(metric.state).noise_flag == pytest.approx(1e-20)
