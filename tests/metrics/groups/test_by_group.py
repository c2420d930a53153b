"""Functions by group: a loop over groups, written out."""

from functools import partial

import pytest
import torch
from cases import CASES
from helpers.numbers import close
from helpers.refusals import assert_refused

import torchcalib as tc

SOME = [
    case for case in CASES if str(case).startswith(("nce-multilabel-logits", "ece-multiclass", "tce-binary", "ks-per"))
]


MULTI = {"task": "multiclass", "from_logits": True}


def data():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 3, generator=g, dtype=torch.float64)
    return 3 * logits, torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1), torch.arange(300) % 4


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


def test_what_has_no_streaming_class_or_several_values_and_batches_class_axes_and_ways_of_weighing():
    logits, target, groups = data()
    folds = torch.arange(300) // 4 % 5
    values = tc.by_group(tc.rcl, logits, target, groups, folds=folds, **MULTI)
    parts = tc.by_group(tc.corp, logits, target, groups, num_groups=6, **MULTI)
    for k in range(4):
        rows = groups == k
        close(values[k], tc.rcl(logits[rows], target[rows], folds=folds[rows], **MULTI))
        close(parts.mcb[k], tc.corp(logits[rows], target[rows], **MULTI).mcb)
    assert type(parts) is tc.CORPDecomposition
    assert parts.unc[4:].isnan().all()
    votes = torch.nn.functional.one_hot(target, 3).double()
    by_group = partial(tc.by_group, tc.ece, groups=groups, **MULTI)
    one = by_group(logits, target)
    both = by_group(torch.stack((logits, -logits)), torch.stack((target, target)))
    assert both.shape == (4, 2)
    for found in (both[:, 0], *(by_group(logits.T, labels, class_axis=0) for labels in (target, votes.T))):
        close(found, one)
    close(by_group(logits, target, weights=torch.ones(5, 300)), one.unsqueeze(-1).expand(4, 5))


def test_a_failing_group_is_named():
    logits, target, groups = data()
    groups[groups == 3] = 2
    groups[5] = 3
    with pytest.raises(ValueError, match="at least 2 samples of every class") as raised:
        tc.by_group(tc.rcl, logits, target, groups, **MULTI)
    assert raised.value.__notes__ == ["in group 3, of 1 samples; give rows of groups that are too small the number -1"]


def test_bad_arguments_are_refused_and_no_rows_are_groups_without_a_value():
    given = {"function": tc.ece, "preds": torch.tensor([0.2, 0.7, 0.9]), "target": torch.tensor([0, 1, 1])}
    given |= {"groups": torch.tensor([0, 1, 2]), "task": "binary"}
    wrong = [
        ({"groups": [0, 1, 1]}, TypeError, "must be a tensor of integers"),
        ({"groups": torch.tensor([0, 1])}, ValueError, "one number per sample"),
        ({"groups": torch.tensor([0, -2, 1])}, ValueError, "must be numbers in [0, 1]"),
        ({"num_groups": 2}, ValueError, "must be numbers in [0, 1]"),
        ({"function": "ece"}, TypeError, "`function` must be a function such as"),
        ({"function": lambda *_, **__: 1.0}, TypeError, "`function` must return a tensor"),
        ({"target": torch.tensor([0, 1])}, ValueError, "as many samples"),
    ]
    assert_refused(
        (change, partial(tc.by_group, **{**given, **change}), error, [said]) for change, error, said in wrong
    )
    nothing = {name: value[:0] for name, value in given.items() if torch.is_tensor(value)}
    assert tc.by_group(**{**given, **nothing}, num_groups=3).isnan().tolist() == [True] * 3
