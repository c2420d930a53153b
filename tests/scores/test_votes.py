"""Votes as targets, and the distances to them: against slow loops, closed forms and drawn votes."""

import math
from functools import partial

import oracles
import pytest
import torch

import torchcalib as tc
from torchcalib.binomial import entropy_of_counts, mean_distance_of_share, mean_log_share

DISTANCES = {
    "tv": (tc.total_variation, tc.total_variation_per_sample, tc.TotalVariation, oracles.total_variation_of),
    "kl": (tc.kl_divergence, tc.kl_divergence_per_sample, tc.KLDivergence, oracles.kl_of),
    "entropy": (tc.entropy_difference, tc.entropy_difference_per_sample, tc.EntropyDifference,
                oracles.entropy_difference_of),
    "votes": (tc.votes_distance, tc.votes_distance_per_sample, tc.VotesDistance, oracles.brier_of),
}  # fmt: skip
FLOORS = {
    "tv": oracles.total_variation_floor,
    "kl": oracles.entropy_floor,
    "entropy": oracles.entropy_floor,
    "votes": oracles.brier_floor,
}
SETTINGS = [(name, c) for name in DISTANCES for c in ("value", "noise_floor", "corrected")]
SETTINGS.remove(("tv", "corrected"))
TASKS = ("binary", "multiclass", "multilabel")
C = 4


def data(task, n=30, seed=0, dtype=torch.float64, most=9, lead=()):
    """Logits, and at least two votes on each row."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*lead, n) if task == "binary" else (*lead, n, C)
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    counts = torch.randint(0, most, shape if task == "multiclass" else (*shape, 2), generator=generator)
    counts[..., 0] += 2 * (counts.sum(-1) < 2)
    return logits.to(dtype), counts


def known_entropy(counts):
    """sum_k n_k / n (1 / n_k + ... + 1 / (n - 1))."""
    n = sum(counts)
    return sum(k / n * sum(1 / j for j in range(k, n)) for k in counts if k)


def corrected(name, q, t, n):
    """With the entropy of votes by digamma of whole numbers, which are sums of inverses, jackknifed by leaving out each
    vote in turn; the unbiased variance.
    """
    if name == "votes":
        return oracles.brier_of(q, t) - sum(share * (1 - share) for share in t) / (n - 1)
    counts = [round(share * n) for share in t]
    without = [[k - (j == i) for j, k in enumerate(counts)] for i, voted in enumerate(counts) for _ in range(voted)]
    entropy = n * known_entropy(counts) - (n - 1) * sum(map(known_entropy, without)) / n
    other = oracles.nll_of(q, t) if name == "kl" else -sum(oracles.xlogy(p, p) for p in q)
    return other - entropy


def slow(name, component, task, q, votes):
    """One sample: probabilities over classes and counts of votes."""
    n = sum(votes)
    t = [v / n for v in votes]
    if component == "noise_floor":
        value = FLOORS[name](q, n)
    else:
        value = DISTANCES[name][3](q, t) if component == "value" else corrected(name, q, t, n)
    return value / 2 if name == "votes" and task != "multiclass" else value


def as_classes(task, logits, counts):
    """Rows of probabilities over classes, and their counts."""
    if task == "multiclass":
        return logits.softmax(-1).reshape(-1, C).tolist(), counts.reshape(-1, C).tolist()
    p = logits.sigmoid().reshape(-1)
    return torch.stack((1 - p, p), -1).tolist(), counts.reshape(-1, 2).tolist()


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("name", "component"), SETTINGS)
def test_slow_loop_of_every_sample(name, component, task, from_logits):
    logits, counts = data(task)
    expected = [slow(name, component, task, *row) for row in zip(*as_classes(task, logits, counts), strict=True)]
    expected = torch.tensor(expected, dtype=torch.float64).reshape(logits.shape if task != "multiclass" else (-1,))
    preds = logits if from_logits else logits.softmax(-1) if task == "multiclass" else logits.sigmoid()
    options = {"task": task, "component": component, "from_logits": from_logits}
    of_function, of_sample, cls, _ = DISTANCES[name]
    torch.testing.assert_close(of_sample(preds, counts, **options), expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(of_function(preds, counts, **options), expected.mean(), rtol=1e-11, atol=1e-13)
    weights = torch.arange(30) % 4
    metric = cls(**options, **({"num_labels": C} if task == "multilabel" else {}))
    for piece in (slice(0, 7), slice(7, 7), slice(7, 30)):
        metric.update(preds[piece], counts[piece], weights=weights[piece])
    mean = (expected * (weights if task != "multilabel" else weights.unsqueeze(-1))).sum(0) / weights.sum()
    torch.testing.assert_close(metric.compute(), mean.mean(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("name", "component"), SETTINGS)
def test_gradient_is_that_of_finite_differences(name, component, task):
    logits, counts = data(task, n=5)
    call = partial(DISTANCES[name][0], target=counts, task=task, component=component, from_logits=True)
    assert torch.autograd.gradcheck(call, logits.requires_grad_())
    probs = (logits.softmax(-1) if task == "multiclass" else logits.sigmoid()).detach().requires_grad_()
    call = partial(call, from_logits=False, validate_args=False)
    assert torch.autograd.gradcheck(call, probs)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("name", "component"), SETTINGS)
def test_laws_of_metrics_hold_for_votes(name, component, task):
    """Batches are loops, class axes may stand anywhere, half types, mapped and compiled, series kept apart, merged."""
    function, _, cls, _ = DISTANCES[name]
    options = {"task": task, "component": component, "from_logits": True}
    logits, counts = data(task, n=12, lead=(3,))
    whole = function(logits, counts, **options)
    for k in range(3):
        torch.testing.assert_close(whole[k], function(logits[k], counts[k], **options), rtol=1e-12, atol=1e-13)
    if task != "binary":
        first = function(logits.movedim(-1, 1), counts.movedim(2, 1), class_axis=1, **options)
        torch.testing.assert_close(first, whole, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.vmap(partial(function, **options))(logits, counts), whole, rtol=1e-12, atol=1e-13)
    half, exact = (function(x, counts, **options) for x in (logits.half(), logits.half().double()))
    torch.testing.assert_close(half, exact.float(), rtol=2e-5, atol=2e-6)
    own = {"num_labels": C} if task == "multilabel" else {}
    apart, one, other = cls(batch_shape=(3,), **options, **own), cls(**options, **own), cls(**options, **own)
    apart.update(logits[:, :5], counts[:, :5].to(torch.int16))
    apart.update(logits[:, 5:], counts[:, 5:])
    torch.testing.assert_close(apart.compute(), whole, rtol=1e-12, atol=1e-13)
    one.update(logits[:2], counts[:2])
    other.update(logits[2], counts[2])
    one.merge_state(other)
    torch.testing.assert_close(one.compute(), whole.mean(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("function", [tc.kl_divergence, tc.ece])
def test_compiled_functions_read_votes(function):
    torch.compiler.reset()
    logits, counts = data("multiclass")
    call = partial(function, task="multiclass", from_logits=True)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(logits, counts), call(logits, counts))
    counts[3] = 0
    assert compiled(logits, counts).isnan()


METRICS = {
    "nll": tc.nll, "brier": tc.brier_score, "ecd": tc.ecd, "accuracy": tc.accuracy, "risk": tc.bayes_risk,
    "ece": tc.ece, "esce": tc.esce, "mce": tc.mce, "rmsce": tc.rmsce, "ace": tc.ace, "ks": tc.ks,
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("function", METRICS.values(), ids=METRICS)
def test_counts_are_their_shares_wherever_soft_targets_are_read(function, task):
    logits, counts = data(task)
    n = counts.sum(-1, keepdim=True)
    shares = counts / n.double()
    given = shares if task == "multiclass" else shares[..., 1]
    options = {"task": task, "from_logits": True}
    torch.testing.assert_close(function(logits, counts, **options), function(logits, given, **options))
    if task == "multiclass":
        options["positive_classes"] = [0, 2]
        torch.testing.assert_close(function(logits, counts, **options), function(logits, given, **options))


def test_closed_form_of_two_votes_of_three():
    """q = (1/2, 1/2), two votes for the first class and one for the other."""
    preds, votes = torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([[2, 1]])
    found = {(name, c): float(DISTANCES[name][0](preds, votes, task="multiclass", component=c)) for name, c in SETTINGS}
    entropy = math.log(3) - 2 / 3 * math.log(2)
    expected_entropy = 3 / 4 * entropy  # three of one class in two of eight
    assert found == pytest.approx(
        {
            ("tv", "value"): 1 / 6,
            ("tv", "noise_floor"): (2 * 1 / 2 + 6 * 1 / 6) / 8,
            ("kl", "value"): math.log(2) - entropy,
            ("kl", "noise_floor"): math.log(2) - expected_entropy,
            ("kl", "corrected"): math.log(2) - (2 / 3 * (1 / 2) + 1 / 3 * (1 + 1 / 2)) - 1 / 3,
            ("entropy", "value"): math.log(2) - entropy,
            ("entropy", "noise_floor"): math.log(2) - expected_entropy,
            ("entropy", "corrected"): math.log(2) - (2 / 3 * (1 / 2) + 1 / 3 * (1 + 1 / 2)) - 1 / 3,
            ("votes", "value"): 2 / 36,
            ("votes", "noise_floor"): 1 / 6,
            ("votes", "corrected"): 2 / 36 - 2 * (2 / 9) / 2,
        },
        abs=1e-14,
    )


# What chance makes of few votes.


def expected_of_share(of, p, n):
    """The sum over all counts, in logs, for numbers of votes beyond those of exact whole numbers."""
    total = 0.0
    for x in range(n + 1):
        log_chance = math.lgamma(n + 1) - math.lgamma(x + 1) - math.lgamma(n - x + 1)
        log_chance += (x * math.log(p) if x else 0) + ((n - x) * math.log1p(-p) if n > x else 0)
        total += math.exp(log_chance) * of(x / n)
    return total


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.02, 1 / 3, 0.5, 0.97, 1 - 1e-9, 1.0])
@pytest.mark.parametrize("n", [1, 2, 7, 48, 49, 50, 99, 150, 400, 3000])
def test_slow_sum_over_all_counts_of_what_is_expected_of_a_share(n, p):
    """Rounding of the slow sum's chances grows with n; up to 100 expected votes the rule is good for 1e-10."""
    share, votes = torch.tensor(p, dtype=torch.float64), torch.tensor(float(n), dtype=torch.float64)
    if p in (0, 1):
        assert mean_distance_of_share(share, votes) == 0
        assert float(p * mean_log_share(share, votes)) == pytest.approx(0, abs=2e-9)
        return
    distance = expected_of_share(lambda t: abs(t - p), p, n)
    assert float(mean_distance_of_share(share, votes)) == pytest.approx(distance, rel=1e-9, abs=1e-15)
    entropy = expected_of_share(lambda t: oracles.xlogy(t, t), p, n)
    tolerance = 1e-14 * n if n * p < 50 else 1e-10 if n * p < 100 else 2e-9
    assert float(p * mean_log_share(share, votes)) == pytest.approx(entropy, rel=0, abs=max(tolerance, 1e-14 * n))


def drawn(q, n, repeats, seed):
    """Counts of n votes drawn from q, `(repeats, C)`."""
    generator = torch.Generator().manual_seed(seed)
    votes = torch.multinomial(q.expand(repeats, -1), n, replacement=True, generator=generator)
    return torch.nn.functional.one_hot(votes, len(q)).sum(-2)


def within_errors(scores, expected, errors=4.5):
    """Whether a mean is what is expected, within so many standard errors of it."""
    return abs(float(scores.mean()) - expected) <= errors * float(scores.std()) / math.sqrt(len(scores))


@pytest.mark.parametrize("n", [1, 3, 20])
@pytest.mark.parametrize("name", DISTANCES)
def test_noise_floor_is_the_mean_of_drawn_votes(name, n):
    q = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64)
    votes = drawn(q, n, 20_000, seed=n)
    preds = q.expand(len(votes), -1)
    function, of_sample, *_ = DISTANCES[name]
    floor = function(preds, votes, task="multiclass", component="noise_floor")
    assert within_errors(of_sample(preds, votes, task="multiclass"), float(floor))


@pytest.mark.parametrize("n", [2, 3, 10])
def test_corrected_distance_is_that_to_what_votes_were_drawn_from(n):
    q, truth = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.2, 0.1])
    votes = drawn(truth, n, 20_000, seed=n)
    preds, expected = q.expand(len(votes), -1), float((q - truth).square().sum())
    assert within_errors(tc.votes_distance_per_sample(preds, votes, task="multiclass", component="corrected"), expected)
    assert not within_errors(tc.votes_distance_per_sample(preds, votes, task="multiclass"), expected)
    voted, p = votes[:, :2], torch.tensor(0.4, dtype=torch.float64)
    enough = voted.sum(-1) >= 2
    scores = tc.votes_distance_per_sample(p.expand(len(votes))[enough], voted[enough], task="binary",
                                          component="corrected")  # fmt: skip
    assert within_errors(scores, (0.4 - 0.2 / 0.9) ** 2)


def too_large(q, n):
    """What is stated of the bias that remains in a corrected entropy."""
    return sum(p * ((1 - p) ** (n - 1) - sum((1 - p) ** v / v for v in range(n, 3000))) for p in q)


def entropy_of(q):
    return -sum(oracles.xlogy(p, p) for p in q)


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_corrected_entropy_is_off_by_what_is_stated_and_that_is_less(n):
    """Expectations over all counts of two classes; of ten, from those of each, less than Miller-Madow's."""
    for p in (0.5, 0.3, 0.1):
        plain = found = 0.0
        for k in range(n + 1):
            chance, t = math.comb(n, k) * p**k * (1 - p) ** (n - k), k / n
            shares = torch.tensor([t, 1 - t], dtype=torch.float64)
            found += chance * float(entropy_of_counts(shares, torch.tensor([float(n)], dtype=torch.float64)))
            plain += chance * entropy_of([t, 1 - t])
        bias = found - entropy_of([p, 1 - p])
        assert bias == pytest.approx(too_large([p, 1 - p], n), abs=1e-12)
        assert abs(bias) < entropy_of([p, 1 - p]) - plain
    total = sum(1 / k for k in range(1, 11))
    q = [1 / k / total for k in range(1, 11)]
    plain = -oracles.entropy_floor(q, n)
    # Which adds (K - 1) / 2n, K classes having votes.
    miller = plain + (sum(1 - (1 - p) ** n for p in q) - 1) / (2 * n)
    assert abs(too_large(q, n)) < abs(miller) / 2 < abs(plain) / 2


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_corrected_divergence_and_entropy_difference_of_drawn_votes(n):
    q = [0.6, 0.25, 0.1, 0.05]
    votes = drawn(torch.tensor(q, dtype=torch.float64), n, 20_000, seed=n)
    preds = torch.full((len(votes), 4), 0.25, dtype=torch.float64)
    expected = math.log(4) - entropy_of(q) - too_large(q, n)
    for of_sample in (tc.kl_divergence_per_sample, tc.entropy_difference_per_sample):
        assert within_errors(of_sample(preds, votes, task="multiclass", component="corrected"), expected)
        assert not within_errors(of_sample(preds, votes, task="multiclass"), expected)


# Extremes, and what is refused.


def test_saturated_logits_are_exact_with_finite_gradients():
    logits = torch.tensor([[800.0, 0.0, -800.0], [0.0, -torch.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    votes = torch.tensor([[0, 3, 1], [2, 0, 2]])
    for name, component in SETTINGS:
        per_sample = DISTANCES[name][1](logits, votes, task="multiclass", from_logits=True, component=component)
        assert per_sample.isfinite().all()
        (gradient,) = torch.autograd.grad(per_sample.sum(), logits)
        assert gradient.isfinite().all(), (name, component)
    kl = tc.kl_divergence_per_sample(logits, votes, task="multiclass", from_logits=True)
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    torch.testing.assert_close(kl, torch.tensor([0.75 * 800 + 0.25 * 1600 - entropy, 0.0], dtype=torch.float64))
    certain = torch.tensor([[1.0, 0.0]], requires_grad=True)
    value = tc.kl_divergence(certain, torch.tensor([[3, 1]]), task="multiclass")
    assert value == torch.inf
    assert torch.autograd.grad(value, certain)[0].isfinite().all()
    assert tc.kl_divergence(certain, torch.tensor([[3, 0]]), task="multiclass") == 0


@pytest.mark.parametrize("name", DISTANCES)
def test_rows_that_do_not_count_may_hold_any_votes(name):
    logits, counts = data("multiclass", n=8)
    spoiled, weights = counts.clone(), torch.ones(8)
    spoiled[2], spoiled[5], weights[[2, 5]] = 0, -7, 0
    keep = weights > 0
    for component in ("value", "noise_floor"):
        call = partial(DISTANCES[name][0], task="multiclass", from_logits=True, component=component)
        expected = call(logits[keep], counts[keep])
        torch.testing.assert_close(call(logits, spoiled, weights=weights), expected)
        spoiled[5] = 0
        torch.testing.assert_close(call(logits, spoiled, nan_policy="drop"), expected)
        spoiled[5] = -7
    metric = DISTANCES[name][2](task="multiclass", from_logits=True, nan_policy="drop")
    spoiled[5] = 0
    metric.update(logits, spoiled)
    assert metric.n_dropped() == 2
    torch.testing.assert_close(metric.compute(), DISTANCES[name][0](logits[keep], counts[keep], task="multiclass",
                                                                    from_logits=True))  # fmt: skip


@pytest.mark.parametrize(("name", "component"), [s for s in SETTINGS if s[1] != "value"])
def test_shares_of_unknown_counts_have_no_correction(name, component):
    logits, counts = data("multiclass")
    call = partial(DISTANCES[name][0], task="multiclass", from_logits=True, component=component)
    with pytest.raises(TypeError, match=r"`target` must be counts of votes, .* got torch.float64 .* Pass vote counts"):
        call(logits, counts / counts.sum(-1, keepdim=True).double())
    if component == "corrected":
        with pytest.raises(TypeError, match=r"`target` must be counts of votes, .* got torch.int64 \(30,\)"):
            call(logits, counts.argmax(-1))
        counts[3] = torch.tensor([0, 1, 0, 0])
        with pytest.raises(ValueError, match=r"`target` must count at least 2 votes in every row, got 1 \(1 of 30"):
            call(logits, counts)


def test_wrong_components_and_options_are_refused():
    logits, counts = data("multiclass")
    with pytest.raises(ValueError, match="`component` must be one of 'value', 'noise_floor', got 'corrected'"):
        tc.total_variation(logits, counts, task="multiclass", component="corrected")
    with pytest.raises(ValueError, match="`component` must be one of 'value', 'noise_floor', 'corrected', got 'bias'"):
        tc.KLDivergence(task="binary", component="bias")
    with pytest.raises(ValueError, match="`priors` must be None for distances to votes"):
        tc.VotesDistance(task="binary", priors=[0.5, 0.5])


def test_a_collection_shares_the_reading_but_not_what_a_metric_demands():
    logits, counts = data("multiclass")
    of = {"task": "multiclass", "from_logits": True}
    metrics = {
        "kl": tc.KLDivergence(**of),
        "corrected": tc.KLDivergence(**of, component="corrected"),
        "nll": tc.NLL(**of),
    }
    collection = tc.CalibrationCollection(metrics)
    collection.update(logits, counts)
    values = collection.compute()
    torch.testing.assert_close(values["kl"], tc.kl_divergence(logits, counts, **of))
    corrected = tc.kl_divergence(logits, counts, **of, component="corrected")
    torch.testing.assert_close(values["corrected"], corrected)
    counts[3] = torch.tensor([0, 1, 0, 0])
    with pytest.raises(ValueError, match="at least 2 votes"):
        collection.update(logits, counts)
    torch.testing.assert_close(collection.compute()["corrected"], corrected)


def test_reports_and_comparisons_read_votes_as_their_shares():
    logits, counts = data("multiclass", n=60)
    shares = counts / counts.sum(-1, keepdim=True).double()
    options = {"task": "multiclass", "from_logits": True}
    counted, shared = (tc.report(logits, target, **options) for target in (counts, shares))
    assert [line.value for line in counted.lines] == pytest.approx([line.value for line in shared.lines])
    systems = {"a": logits, "b": logits.flip(0)}
    counted, shared = (tc.compare(systems, target, **options) for target in (counts, shares))
    for one, other in zip(counted.lines, shared.lines, strict=True):
        assert one.values == pytest.approx(other.values)
