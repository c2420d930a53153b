"""Updates with the summary of a batch, compared with the conversion of the same batch, and with loops."""

import pytest
import torch

import torchcalib as tc
from torchcalib.core import events
from torchcalib.functional import estimator
from torchcalib.metrics import base

METRICS = (tc.ECE, tc.ESCE, tc.MCE, tc.RMSCE, tc.NLL, tc.BrierScore, tc.ECD, tc.Accuracy)


def batch(task, from_logits, dtype, n=70, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((n,) if task == "binary" else (n, 7), generator=generator)
    target = torch.randint(2 if task == "binary" else 7, (n,), generator=generator)
    preds = logits if from_logits else logits.sigmoid() if task == "binary" else logits.softmax(-1)
    return preds.to(dtype), target


def options_of(task, from_logits):
    return {"task": task, "from_logits": from_logits, **({"num_classes": 7} if task == "multiclass" else {})}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_states_equal_those_of_converted_batches(task, from_logits, dtype, monkeypatch):
    options = options_of(task, from_logits)
    given = [batch(task, from_logits, dtype, seed=seed) for seed in range(2)]
    here = {cls.__name__: cls(**options) for cls in METRICS}
    together = tc.CalibrationCollection({name: cls(**options) for name, cls in zip(here, METRICS, strict=True)})
    there = {cls.__name__: cls(**options) for cls in METRICS}
    for preds, target in given:
        together.update(preds, target)
        for metric in here.values():
            metric.update(preds, target)
    monkeypatch.setattr(base, "summary_of", lambda *_: None)
    for preds, target in given:
        for metric in there.values():
            metric.update(preds, target)
    for name, metric in there.items():
        torch.testing.assert_close(here[name].state, metric.state, rtol=1e-12, atol=1e-12)
        # A metric alone needs fewer statistics of rows, whose pass may round float32 numbers differently.
        rtol = 1e-12 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(together[name].state, metric.state, rtol=rtol, atol=1e-12)
        torch.testing.assert_close(here[name].compute(), metric.compute(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_functions_equal_those_of_converted_batches(task, from_logits, monkeypatch):
    preds, target = batch(task, from_logits, torch.float32)
    options = {"task": task, "from_logits": from_logits}
    found = [cls.function(preds, target, **options) for cls in METRICS]
    monkeypatch.setattr(estimator, "summary_of", lambda *_: None)
    expected = [cls.function(preds, target, **options) for cls in METRICS]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_values_of_16_bits_are_not_converted_at_once(dtype, from_logits, monkeypatch):
    loops = pytest.importorskip("torchcalib.ops.softmax_stats.numba", exc_type=ImportError)
    monkeypatch.setattr(events, "source_of", lambda *_: loops)
    logits, target = torch.randn(1_100, 1_000, generator=torch.Generator().manual_seed(0)), torch.arange(1_100) % 1_000
    preds = (logits if from_logits else logits.softmax(-1)).to(dtype)
    how = tc.ECE(task="multiclass", from_logits=from_logits).input_format
    found = events.summary_of(how, preds, target, "entropy")
    monkeypatch.setattr(events, "_MAX_CONVERTED", preds.numel())
    expected = events.summary_of(how, preds, target, "entropy")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    target[5] = 1_000
    assert events.summary_of(how, preds, target, "entropy") is None


def test_other_input_is_converted():
    preds, target = batch("multiclass", from_logits=True, dtype=torch.float32)
    how = tc.ECE(task="multiclass", from_logits=True).input_format
    others = [
        (preds[:0], target[:0]),
        (preds, target.int()),
        (preds.requires_grad_(), target),
        (preds.detach(), target.float()),
        (torch.rand_like(preds.detach()), target),  # may be probabilities
        (torch.complex(preds.detach(), preds.detach()).conj().imag, target),  # negated memory
    ]
    for values, labels in others:
        assert events.summary_of(how, values, labels, "entropy") is None
    for options in ({"ignore_index": 0}, {"nan_policy": "drop"}, {"positive_classes": [1]}):
        how = tc.ECE(task="multiclass", from_logits=True, **options).input_format
        assert events.summary_of(how, preds.detach(), target, "entropy") is None
    with torch.no_grad():
        found = torch.func.vmap(lambda x: tc.functional.ece(x, target, task="multiclass", from_logits=True))(
            preds.detach().expand(2, -1, -1)
        )
    assert found.shape == (2,)
