"""Log-odds of events over classes: 50 digits of mpmath, closed forms, and independence of the position of a row."""

import mpmath
import pytest
import torch
from helpers.kernels import of_backends

from torchcalib.ops.log_odds import log_odds

F64 = torch.float64
INF, NAN = torch.inf, torch.nan
EVENTS = {
    "each class": lambda z: None,
    "top class": lambda z: z.detach().argmax(-1, keepdim=True),
    "two classes": lambda z: z.detach().topk(2, -1).indices,
    "least class": lambda z: z.detach().argmin(-1, keepdim=True),
}


def logits(n=8, n_classes=5, scale=3.0, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(n, n_classes, generator=generator, dtype=F64)).to(dtype)


def exact(row, members):
    """Compute the log-odds by definition, with 50 digits."""
    with mpmath.workdps(50):
        powers = [mpmath.exp(mpmath.mpf(x)) for x in row]
        own = mpmath.fsum(powers[k] for k in members)
        rest = mpmath.fsum(p for k, p in enumerate(powers) if k not in members)
        return float(mpmath.log(own) - mpmath.log(rest))


@of_backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64], ids=str)
@pytest.mark.parametrize("scale", [1, 16, 300])
def test_log_odds_of_every_event_equal_mpmath(backend, dtype, scale):
    """The difference of two logits and two logarithms of at most log C, each rounded once, has an error of few eps."""
    z = logits(scale=scale, dtype=dtype)
    for members_of in EVENTS.values():
        members = members_of(z)
        found = log_odds(z, members, backend=backend)
        for i, row in enumerate(z.double().tolist()):
            sets = [[k] for k in range(5)] if members is None else [members[i].tolist()]
            expected = torch.tensor([exact(row, own) for own in sets], dtype=F64)
            torch.testing.assert_close(found[i].reshape(-1), expected, rtol=1e-15, atol=4e-15)


@of_backends
@pytest.mark.parametrize("members_of", EVENTS.values(), ids=EVENTS)
@pytest.mark.parametrize("n_classes", [3, 10, 33])
def test_equal_rows_have_equal_log_odds_in_any_batch(backend, n_classes, members_of):
    """Equal samples must be ties. The documentation promises results that are independent of the batch size."""
    z = logits(37, n_classes, dtype=torch.float32)

    def call(x):
        return log_odds(x, members_of(x), backend=backend)

    whole = call(z)
    for n in (1, 2, 5, 36):
        assert torch.equal(torch.cat([call(z[:n]), call(z[n:])]), whole)
    assert torch.equal(call(z.repeat(700, 1)), whole.repeat(700, *[1] * (whole.dim() - 1)))
    assert torch.equal(call(z.T.contiguous().T), whole)


@of_backends
def test_log_odds_of_ties_infinite_logits_and_invalid_rows(backend):
    tied = log_odds(torch.tensor([[2.0, 2, 0, -1], [0, 2, -1, 2], [1, 1, 1, 1]]))
    assert tied[0, 0] == tied[0, 1]
    assert tied[1, 1] == tied[1, 3]
    assert tied[2].tolist() == pytest.approx([-torch.tensor(3.0).log().item()] * 4, abs=1e-7)
    z = torch.tensor([[INF, 0, -INF], [INF, INF, INF], [1e4, -INF, -INF], [NAN, 0, 1], [-INF] * 3])
    half = -torch.tensor(2.0, dtype=F64).log()
    expected = torch.tensor([[INF, -INF, -INF], [half] * 3, [INF, -INF, -INF], [NAN] * 3, [NAN] * 3], dtype=F64)
    torch.testing.assert_close(log_odds(z), expected, equal_nan=True)
    first = torch.zeros(5, 1, dtype=torch.int64)
    torch.testing.assert_close(log_odds(z, first, backend=backend), expected[:, 0], equal_nan=True)
    for members in (None, first):
        leaf = z.clone().requires_grad_()
        log_odds(leaf, members)[:3].clamp(-9, 9).sum().backward()
        assert torch.equal(leaf.grad, torch.zeros_like(z))  # an unused row does not propagate its NaN


@pytest.mark.parametrize("members", [None, [0]])
def test_gradient_of_log_odds_is_exact_beyond_the_range_of_float64_powers(members):
    """The derivative of the log-odds of the top class is 1 for itself, and minus the softmax over the other classes."""
    z = torch.tensor([[900.0, 0.0, 0.0]], dtype=F64, requires_grad=True)
    found = log_odds(z, None if members is None else torch.tensor([members]))
    found.reshape(-1)[0].backward()
    assert z.grad.tolist() == [[1, -0.5, -0.5]]
