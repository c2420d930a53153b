"""Checks of test_faults.py that all ranks run together and compare with one process. A difference raises an error."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import CASES, paths
from torchmetrics.utilities.distributed import gather_all_tensors

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.ops.counter_rng import poisson_counts


def close(a, b, bound=1e-12):
    torch.testing.assert_close(a, b, rtol=bound, atol=bound, equal_nan=True)


def rows(n):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, generator=generator, dtype=torch.float64), torch.randint(0, 2, (n,), generator=generator)


def share(rank, world, n):
    """Return the rows of a rank: uneven numbers, and none for the last of more than two ranks."""
    if world == 2:
        return (slice(0, n // 3), slice(n // 3, n))[rank]
    cuts = [0, *(n * (k + 1) ** 2 // (world - 1) ** 2 for k in range(world - 1)), n]
    return slice(cuts[rank], cuts[rank + 1])


def update(metric, part, *columns, **more):
    """Update with a part of the rows. A rank without rows never calls update."""
    if len(columns[1][part]):
        metric.update(*(x[part] for x in columns), **{k: None if x is None else x[part] for k, x in more.items()})
    return metric


def computed_in(collectives, metrics):
    """Compute the values, and check that exactly these collectives are called."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather"):
            original = getattr(dist, name)
            patch.setattr(dist, name, lambda *args, _o=original, _n=name, **kw: (calls.append(_n), _o(*args, **kw))[1])
        values = metrics.compute()
    assert calls == collectives, calls
    return values


def assert_equal_on_all_ranks(value, world):
    everyone = [torch.empty_like(value) for _ in range(world)]
    dist.all_gather(everyone, value)
    assert all(torch.equal(other, value) or other.isnan().all() for other in everyone), "ranks differ"


def check_values_of_every_metric(rank, world):
    """Two ranks test one case per path, and every second case has all rows on rank 0. More ranks test all cases."""
    of_paths = [param.values[0] for param in paths() if not param.marks]
    for k, case in enumerate(of_paths if world == 2 else CASES):
        shares = [share(r, world, 60) for r in range(world)]
        if world == 2 and k % 2:
            shares = [slice(0, 60), slice(60, 60)]
        preds, target = case.data(n=60, dtype=torch.float32)
        weights = case.weights(60, seed=4)
        # Rank 0 has the same values in another precision.
        preds_of = [preds.float() if r else preds.double() for r in range(world)]
        value = update(case.metric(), shares[rank], preds_of[rank], target, weights=weights).compute()
        if rank == 0:
            whole = case.metric(sync_on_compute=False)
            for own_preds, part in zip(preds_of, shares, strict=True):
                whole.update(own_preds[part], target[part], weights=weights[part])
            close(value, whole.compute())
        assert_equal_on_all_ranks(value, world)


def check_samples_with_different_dtypes_and_weights(rank, world):
    """Ranks have float32, float64, soft targets with weights, or no rows. The state is exact, and a sketch."""
    p, y = rows(40)
    part = share(rank, world, 40)
    p, y = p[part].float(), y[part]
    mine = [(p, y, None), (p.double(), y.double(), 2 * torch.ones_like(y)), (p, y * 0.5, None), (p, y, None)][rank]
    everyone = [None] * world
    dist.all_gather_object(everyone, [x if x is None else x.double() for x in mine])
    p, y, weights = zip(*everyone, strict=True)
    weights = torch.cat([torch.ones_like(of) if w is None else w for of, w in zip(p, weights, strict=True)])
    expected = F.ks(torch.cat(p), torch.cat(y), task="binary", weights=weights)
    for resolution, bound in ((None, 1e-12), (2**13, 1e-4)):
        metric = update(tc.KS(task="binary", resolution=resolution), slice(None), *mine[:2], weights=mine[2])
        close(metric.compute(), expected, bound)


def check_collection_needs_two_collectives(rank, world):
    preds, target = rows(60)
    sums = {"NLL": F.nll, "BrierScore": F.brier_score, "ECD": F.ecd, "ECE": F.ece, "ESCE": F.esce, "MCE": F.mce,
            "RMSCE": F.rmsce}  # fmt: skip
    samples = {"NLL": F.nll, "ECE": F.ece, "ACE": F.ace, "TCE": F.tce, "KS": F.ks}
    for functions, collectives in ((sums, ["all_gather", "all_reduce"]), (samples, ["all_gather"] * 2)):
        metrics = tc.CalibrationCollection([getattr(tc, name)(task="binary") for name in functions])
        update(metrics, share(rank, world, 60), preds, target)
        values = computed_in(collectives, metrics)
        for name, function in functions.items():
            close(values[name], function(preds, target, task="binary"))
        assert all(not m._is_synced and m._to_sync for m in metrics.values())
        if rank == 0:
            assert metrics.compute() == values  # a second call uses the cache, so that no rank waits
    part = share(rank, world, 60)
    metrics.update(preds[part], target[part])  # a rank without rows must discard its cache, too
    close(metrics.compute()["NLL"], values["NLL"])


def check_ranks_have_independent_bootstrap_weights(rank, world):
    preds, target = rows(60)
    metrics = tc.CalibrationCollection({"nll": tc.Bootstrapped(tc.NLL(task="binary"), n_replicates=39, seed=5)})
    alone = tc.Bootstrapped(tc.ECE(task="binary"), n_replicates=39, seed=5)
    times = []
    for r in range(world):
        n, streams = len(target[share(r, world, 60)]), torch.arange(39) + (r << 32)
        times.append(poisson_counts(5, streams, torch.arange(n), torch.float64))
    for metric in (metrics, alone):
        update(metric, share(rank, world, 60), preds, target)
    times = torch.cat(times, -1)
    assert len(times.unique(dim=1).T) > 50, "ranks have the same weights"
    close(metrics.compute()["nll"], F.nll(preds, target, task="binary"))
    close(metrics["nll"].interval().replicates, F.nll(preds, target, task="binary", weights=times))
    close(alone.interval().replicates, F.ece(preds, target, task="binary", weights=times))
    dist.barrier()


def check_groups_need_no_additional_collective(rank, world):
    preds, target = rows(60)
    groups = torch.arange(60) * 7 // 3 % 5
    members = [tc.ByGroup(cls(task="binary"), num_groups=6) for cls in (tc.NLL, tc.ECE, tc.KS, tc.TCE)]
    metrics = tc.CalibrationCollection(dict(zip(("nll", "ece", "ks", "tce"), members, strict=True)))
    update(metrics, share(rank, world, 60), preds, target, groups=groups)
    values = computed_in(["all_gather"] * 2, metrics)
    assert metrics["ks"].n().tolist() == groups.bincount(minlength=6).tolist()
    for name, value in values.items():
        for k in range(6):
            close(value[k], getattr(F, name)(preds[groups == k], target[groups == k], task="binary"))


def check_calibration_test_equals_that_of_one_process(rank, world):
    """Sums are bit-identical if they do not depend on the order, as for probabilities that are multiples of 2^-8."""
    generator = torch.Generator().manual_seed(0)
    preds = torch.softmax(2 * torch.randn(90, 3, generator=generator, dtype=torch.float64), -1)
    coarse = (preds * 256).round() / 256
    coarse[:, 0] += 1 - coarse.sum(-1)
    target = torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    copies, shares = torch.arange(90) % 3, torch.rand(90, generator=generator, dtype=torch.float64)
    given = {"task": "multiclass", "num_classes": 3}
    metrics = [(tc.ECE, "top_label"), (tc.MCE, "classwise"), (tc.TCE, "top_label"), (tc.KS, "classwise")]
    metrics = [partial(cls, **given, mode=mode) for cls, mode in metrics]
    cases = [(partial(tc.ECE, **given), preds, target, shares, 1e-9)]
    cases.append((partial(tc.CORP, task="binary"), coarse[:, 0], (target == 0).long(), None, 0))
    for k, (p, weights, bound) in enumerate(((coarse, None, 0), (coarse, copies, 0), (preds, copies, 1e-9))):
        some = metrics[k : k + 2] if world == 2 else metrics
        cases += [(metric, p, target, weights, bound) for metric in some]
    for make, p, y, weights, bound in cases:
        metric = update(make(), share(rank, world, 90), p, y, weights=weights)
        synced = metric.test(n_replicates=59)
        fields = torch.stack([getattr(synced, name) for name in ("statistic", "noise_floor", "p_value", "low", "high")])
        assert_equal_on_all_ranks(fields.nan_to_num(-1), world)
        if rank == 0:
            whole = update(make(sync_on_compute=False), slice(None), p, y, weights=weights)
            alone = whole.test(n_replicates=59)
            for name, value in zip(("statistic", "noise_floor", "p_value", "low", "high"), fields, strict=True):
                close(value, getattr(alone, name), bound)
        assert metric._is_synced is False, "the local state is not restored"


def check_process_groups_dist_sync_on_step_and_custom_gather(rank, world):
    group = dist.new_group([0, 1])
    if rank < 2:
        metric = tc.ECE(task="binary", process_group=group)
        metric.update(torch.full((1,), 0.5 + 0.25 * rank), torch.tensor([1]))
        close(metric.compute(), torch.tensor((0.5 + 0.25) / 2, dtype=torch.float64))
    gathered = []

    def gather(x, group=None):
        gathered.append(x)
        return gather_all_tensors(x, group)

    p, zeros = torch.arange(world, dtype=torch.float64) / world, torch.zeros(world, dtype=torch.int64)
    mine = p[rank : rank + 1], zeros[:1]
    on_step = tc.NLL(task="binary", dist_sync_on_step=True)
    close(on_step(*mine), F.nll(p, zeros, task="binary"))
    for cls, function in ((tc.KS, F.ks), (tc.NLL, F.nll)):
        metric = cls(task="binary", dist_sync_fn=gather)
        metric.update(*mine)
        gathered.clear()
        close(metric.compute(), function(p, zeros, task="binary"))
        assert gathered


def every_check(rank, world, folder):
    for check in (
        check_values_of_every_metric,
        check_samples_with_different_dtypes_and_weights,
        check_collection_needs_two_collectives,
        check_ranks_have_independent_bootstrap_weights,
        check_groups_need_no_additional_collective,
        check_calibration_test_equals_that_of_one_process,
        check_process_groups_dist_sync_on_step_and_custom_gather,
    ):
        check(rank, world)
