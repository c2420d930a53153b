"""Events of predictions: the k most probable classes as one event, and log-odds of logits that do not saturate.

Log losses are compared with mpmath at 50 digits.
"""

import math
from functools import partial

import mpmath
import oracles
import pytest
import torch

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core.events import reduce_to_events
from torchcalib.core.inputs import read_input

F64 = torch.float64
DTYPES = [torch.float16, torch.bfloat16, torch.float32, F64]
MODES = ["top_label", "classwise", tc.TopK(2), tc.TopK(2, only=True)]


def events(preds, target, which, **options):
    return reduce_to_events(read_input("multiclass", preds, target, options), which)


def test_top_k_of_certain_or_infinite_logits_has_the_closed_form():
    inf = torch.inf
    logits = torch.tensor([[inf, 0, -inf], [inf, inf, inf], [-1.0, 0, -1], [1e4, -inf, -inf]])
    target = torch.tensor([0, 2, 1, 1])
    found = events(logits, target, tc.TopK(2), from_logits=True)
    expected = torch.tensor([1, 2 / 3, (1 + math.exp(-1)) / (1 + 2 * math.exp(-1)), 1], dtype=F64)
    torch.testing.assert_close(found.confidence, expected, rtol=1e-6, atol=0)
    assert found.outcome.tolist() == [True, False, True, True]


# Logits keep the precision that a probability near 1 loses.


def event_classes(row, mode):
    """Return the classes of each event that a mode defines for a row of logits."""
    if mode == "classwise":
        return [[k] for k in range(len(row))]
    which = mode if isinstance(mode, tc.TopK) else tc.TopK(1)
    return [oracles.classes_of_top_k(row, which.k, which.only)]


def log_loss(rows, target, sets_of):
    """Return the mean log loss over rows and events, computed with 50 digits. All rows have equally many events."""
    losses = []
    with mpmath.workdps(50):
        for row, y in zip(rows, target, strict=True):
            powers = [mpmath.exp(mpmath.mpf(z)) for z in row]
            for classes in sets_of(row):
                event = [k for k in range(len(row)) if (k in classes) == (y in classes)]
                rest = [power for k, power in enumerate(powers) if k not in event]
                losses.append(mpmath.log1p(mpmath.fsum(rest) / mpmath.fsum(powers[k] for k in event)))
        return float(mpmath.fsum(losses) / len(losses))


def streamed_log_loss(logits, target, mode, resolution=None):
    """Return the log loss after saving and loading the state of two rows, and merging the state of the others."""
    options = {"num_classes": logits.shape[-1], "mode": mode, "from_logits": True, "persistent": True}
    options |= {"task": "multiclass", "score": "nll", "component": "score", "resolution": resolution}
    one, other, rest = (tc.CORP(**options) for _ in range(3))
    one.update(logits[:2], target[:2])
    other.load_state_dict(one.state_dict())
    rest.update(logits[2:], target[2:])
    other.merge_state(rest)
    return other.compute().item()


GAPS = [(torch.float32, gap) for gap in (15, 17, 20, 38, 50, 700, 5000)]
GAPS += [(dtype, 700) for dtype in DTYPES if dtype != torch.float32]


@pytest.mark.parametrize(("dtype", "gap"), GAPS)
def test_log_loss_of_certain_logits_equals_mpmath_in_functions_and_states(dtype, gap):
    """The function has an error of 4 eps of its dtype. States have float64 errors: each sketch cell has one score."""
    logits = torch.tensor([[gap, 0, 0], [0, 1, 0], [1, 0, 2], [0.5, -0.25, 1]], dtype=torch.float64).to(dtype)
    target = torch.tensor([1, 1, 2, 0])
    for mode in MODES:
        expected = log_loss(logits.tolist(), target.tolist(), partial(event_classes, mode=mode))
        given = {"task": "multiclass", "mode": mode, "from_logits": True, "score": "nll"}
        found = F.corp(logits, target, **given).score
        assert found.item() == pytest.approx(expected, rel=4 * torch.finfo(found.dtype).eps), mode
        for resolution in (None, 2048):
            streamed = streamed_log_loss(logits, target, mode, resolution)
            assert streamed == pytest.approx(expected, rel=1e-14), (mode, resolution)


def test_log_loss_of_certain_positive_classes_equals_mpmath():
    """`positive_classes` uses the same log-odds as the modes."""
    logits, target = torch.tensor([[60.0, 0, 59, 0], [0, 1, 0, 3], [2, 0, 1, 0]]), torch.tensor([1, 3, 0])
    given = {"task": "multiclass", "positive_classes": [0, 2], "from_logits": True, "score": "nll"}
    expected = log_loss(logits.tolist(), target.tolist(), lambda row: [[0, 2]])
    assert F.corp(logits, target, **given).score.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_float32_logits_give_the_value_of_float64(mode):
    """Different confidences must not become ties at 1. The 4,000 rows of 10 classes have log-odds of up to 130."""
    generator = torch.Generator().manual_seed(0)
    logits, target = 16 * torch.randn(4000, 10, generator=generator), torch.randint(0, 10, (4000,), generator=generator)
    for score in ("brier", "nll"):
        given = {"task": "multiclass", "mode": mode, "from_logits": True, "score": score}
        narrow, wide = (torch.stack(F.corp(z, target, **given)) for z in (logits, logits.double()))
        assert wide.isfinite().all()
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n_classes", [3, 5, 10, 20])
@pytest.mark.parametrize("right", [False, True])
def test_uniform_rows_are_assigned_to_the_bin_of_their_edge(n_classes, right):
    """A probability of k / C must be assigned to the bin of the equal-width edge k / C."""
    logits, target = torch.zeros(6, n_classes), torch.arange(6) % n_classes
    for k in range(1, n_classes):
        table = F.tce_table(
            logits, target, task="multiclass", mode=tc.TopK(k), from_logits=True, bins="equal_width",
            n_bins=n_classes, right=right,
        )  # fmt: skip
        assert table.n.nonzero().tolist() == [[k - right]]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_gradients_of_ranked_metrics_at_saturated_logits_equal_finite_differences(mode):
    logits = 4 * torch.randn(9, 4, generator=torch.Generator().manual_seed(3), dtype=F64)
    logits[0, 0] += 40
    target = torch.arange(9) % 4
    given = {"task": "multiclass", "mode": mode, "from_logits": True, "validate_args": False}

    def values(z):
        parts = [F.corp(z, target, score=score, **given).score for score in ("brier", "nll")]
        return torch.stack([*parts, F.ks(z, target, **given), F.ace(z, target, n_bins=3, **given)])

    assert torch.autograd.gradcheck(values, logits.requires_grad_())
