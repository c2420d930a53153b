"""Mean probabilities of the members of an ensemble, against sums of softmaxes and sigmoids in float64."""

import numpy as np
import pytest
import torch

import torchcalib as tc

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = [4 * torch.randn(2, 3, 4, 5, generator=GENERATOR, dtype=torch.float64) for _ in range(3)]
TARGET = torch.randint(0, 3, (2, 4, 5), generator=GENERATOR)
TASKS = {
    "multiclass": (lambda z: z.softmax(1), {"class_axis": 1}),
    "binary": (torch.sigmoid, {}),
    "multilabel": (torch.sigmoid, {}),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mean_of_probabilities(task, dtype):
    """Logits are converted to probabilities before the mean; half precision gives float32."""
    link, axis = TASKS[task]
    logits = [z.to(dtype) for z in LOGITS]
    before = [z.clone() for z in logits]
    expected = sum(link(z.double()) for z in logits) / 3
    found = tc.mean_probabilities((z for z in logits), task, from_logits=True, **axis)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = 1e-15 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found.double(), expected, rtol=1e-6 if tolerance > 1e-9 else 1e-12, atol=tolerance)
    of_probs = tc.mean_probabilities([link(z.double()).numpy() for z in logits])
    torch.testing.assert_close(of_probs, expected, rtol=1e-14, atol=1e-15)
    assert all(torch.equal(z, old) for z, old in zip(logits, before, strict=True))


def test_metrics_accept_the_mean():
    """The value is that of the mean prediction; the mean of logits has another one."""
    mean = tc.mean_probabilities(LOGITS, "multiclass", from_logits=True, class_axis=1)
    options = {"num_classes": 3, "mode": "classwise", "per_image": True, "class_axis": 1}
    metric = tc.ECE(**options)
    metric.update(mean, TARGET)
    expected = tc.ece(sum(z.softmax(1) for z in LOGITS) / 3, TARGET, **options)
    assert float(metric.compute()) == pytest.approx(float(expected), abs=1e-12)
    of_logits = tc.ece(sum(LOGITS) / 3, TARGET, from_logits=True, **options)
    assert float(of_logits) != pytest.approx(float(expected), abs=1e-3)


def test_members_are_read_one_at_a_time():
    """An iterator of one member is enough, and its memory is not shared."""
    probs = LOGITS[0].softmax(1)
    found = tc.mean_probabilities(iter([probs]))
    assert torch.equal(found, probs)
    assert found.data_ptr() != probs.data_ptr()
    rows = tc.mean_probabilities([np.array([[0.25, 0.75]]), [[0.75, 0.25]]])
    assert rows.tolist() == [[0.5, 0.5]]


def test_infinite_and_missing_values():
    """A logit of +inf has probability 1. A missing prediction stays missing, for `nan_policy`."""
    rows = [torch.tensor([[torch.inf, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, -torch.inf], [torch.nan, 0.0]])]
    found = tc.mean_probabilities(rows, "multiclass", from_logits=True)
    assert found[0].tolist() == [1, 0]
    assert found[1].isnan().all()
    mean = tc.mean_probabilities([torch.tensor([0.2, torch.nan]), torch.tensor([0.4, 0.5])])
    assert mean.isnan().tolist() == [False, True]
    assert float(tc.ece(mean, torch.tensor([0, 1]), nan_policy="drop")) == pytest.approx(0.3)


def test_gradient():
    for task, (_, axis) in TASKS.items():

        def mean(*members, task=task, axis=axis):
            return tc.mean_probabilities(members, task, from_logits=True, **axis)

        members = [z[:1, :, :2, 0].clone().requires_grad_() for z in LOGITS]
        assert torch.autograd.gradcheck(mean, members)
    stacked = torch.stack(LOGITS)
    batched = torch.func.vmap(lambda x: tc.mean_probabilities([x, x.flip(-1)], "binary", from_logits=True))(stacked)
    torch.testing.assert_close(batched, (stacked.sigmoid() + stacked.flip(-1).sigmoid()) / 2)
