"""Functions by group: a loop over groups, written out."""

import math

import pytest
import torch
from cases import CASES

import torchcalib as tc

SOME = [
    case for case in CASES if str(case).startswith(("nce-multilabel", "ece-multiclass", "tce-binary", "ks-per-class"))
]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


def data(n=300):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(n, 3, generator=g, dtype=torch.float64)
    return 3 * logits, torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1), torch.arange(n) % 4


@pytest.mark.parametrize("case", SOME, ids=str)
def test_values_and_gradients_are_those_of_a_loop(case):
    preds, target = case.data(n=60)
    groups = torch.randint(0, 4, (60,), generator=torch.Generator().manual_seed(0))
    groups[groups == 2], groups[7] = 1, -1
    weights = case.weights(60)
    a, b = (preds.clone().requires_grad_() for _ in range(2))
    found = tc.by_group(case.function, a, target, groups, task=case.task, num_groups=5, weights=weights, **case.options)
    assert found[[2, 4]].isnan().all()
    held = [0, 1, 3]
    expected = [case.call(b[groups == k], target[groups == k], weights=weights[groups == k]) for k in held]
    close(found[held], torch.stack(expected))
    if case.differentiable:
        found[held].sum().backward()
        torch.stack(expected).sum().backward()
        close(a.grad, b.grad)


def test_what_has_no_streaming_class_and_what_returns_several_values():
    logits, target, groups = data()
    given = {"task": "multiclass", "from_logits": True}
    folds = torch.arange(300) // 4 % 5
    values = tc.by_group(tc.rcl, logits, target, groups, folds=folds, **given)
    parts = tc.by_group(tc.corp, logits, target, groups, num_groups=6, **given)
    for k in range(4):
        rows = groups == k
        close(values[k], tc.rcl(logits[rows], target[rows], folds=folds[rows], **given))
        close(parts.mcb[k], tc.corp(logits[rows], target[rows], **given).mcb)
    assert type(parts) is tc.CORPDecomposition
    assert parts.unc[4:].isnan().all()


def test_batches_class_axes_and_ways_of_weighing_are_kept():
    logits, target, groups = data(40)
    given = {"task": "multiclass", "from_logits": True}
    one = tc.by_group(tc.ece, logits, target, groups, **given)
    both = tc.by_group(tc.ece, torch.stack((logits, -logits)), torch.stack((target, target)), groups, **given)
    assert both.shape == (4, 2)
    close(both[:, 0], one)
    close(tc.by_group(tc.ece, logits.T, target, groups, class_axis=0, **given), one)
    votes = torch.nn.functional.one_hot(target, 3).double()
    close(tc.by_group(tc.ece, logits.T, votes.T, groups, class_axis=0, **given), one)
    close(
        tc.by_group(tc.ece, logits, target, groups, weights=torch.ones(5, 40), **given), one.unsqueeze(-1).expand(4, 5)
    )


def test_a_failing_group_is_named():
    logits, target, groups = data()
    groups[groups == 3] = 2
    groups[5] = 3
    with pytest.raises(ValueError, match="at least 2 samples of every class") as raised:
        tc.by_group(tc.rcl, logits, target, groups, task="multiclass", from_logits=True)
    assert raised.value.__notes__ == ["in group 3, of 1 samples; give rows of groups that are too small the number -1"]


def test_bad_arguments_are_told():
    p, y = torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1])
    for groups, error, said in (
        ([0, 1, 1], TypeError, "must be a tensor of integers"),
        (torch.tensor([0, 1]), ValueError, "one number per sample"),
        (torch.tensor([0, -2, 1]), ValueError, r"must be numbers in \[0, 1\]"),
    ):
        with pytest.raises(error, match=said):
            tc.by_group(tc.ece, p, y, groups, task="binary")
    with pytest.raises(ValueError, match=r"must be numbers in \[0, 1\]"):
        tc.by_group(tc.ece, p, y, torch.tensor([0, 1, 2]), task="binary", num_groups=2)
    with pytest.raises(TypeError, match="`function` must be a function such as"):
        tc.by_group("ece", p, y, torch.tensor([0, 1, 2]), task="binary")
    with pytest.raises(TypeError, match="`function` must return a tensor"):
        tc.by_group(lambda *_, **__: 1.0, p, y, torch.tensor([0, 1, 2]), task="binary")
    with pytest.raises(ValueError, match="as many samples"):
        tc.by_group(tc.ece, p, y[:2], torch.tensor([0, 1, 2]), task="binary")


def test_no_rows_at_all_are_groups_without_a_value():
    nothing = torch.zeros(0)
    found = tc.by_group(tc.ece, nothing, nothing.long(), nothing.long(), task="binary", num_groups=3)
    assert all(math.isnan(value) for value in found.tolist())
    assert len(found) == 3
