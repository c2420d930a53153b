"""One rank of test_faults.py: `python rank.py RANK WORLD FILE`. Raises an error on any difference."""

import datetime
import sys

import pytest
import torch
import torch.distributed as dist
from cases import CASES, paths
from torchmetrics.utilities.distributed import gather_all_tensors

import torchcalib as tc
from torchcalib.kernels.draws import poisson_counts


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


def rows(n):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, generator=generator, dtype=torch.float64), torch.randint(0, 2, (n,), generator=generator)


def share(rank, world, n):
    """Return the rows of a rank: uneven shares, and none for the last of more than two ranks."""
    if world == 2:
        return (slice(0, n // 3), slice(n // 3, n))[rank]
    cuts = [0, *(n * (k + 1) ** 2 // (world - 1) ** 2 for k in range(world - 1)), n]
    return slice(cuts[rank], cuts[rank + 1])


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


def every_metric_agrees_with_one_process(rank, world):
    """Two ranks test one case for each path, every other one with all rows on rank 0. More ranks test all cases."""
    of_paths = [param.values[0] for param in paths() if not param.marks]
    for k, case in enumerate(of_paths if world == 2 else CASES):
        shares = [share(r, world, 60) for r in range(world)]
        if world == 2 and k % 2:
            shares = [slice(0, 60), slice(60, 60)]
        preds, target = case.data(n=60, dtype=torch.float32)
        weights = case.weights(60, seed=4)
        mine = shares[rank]
        if rank == 0:
            preds = preds.double()  # the same numbers on a rank that works in another precision
        metric = case.metric()
        if len(target[mine]):  # the empty rank never calls update
            metric.update(preds[mine], target[mine], weights=weights[mine])
        value = metric.compute()
        whole = case.metric(sync_on_compute=False)
        for r, piece in enumerate(shares):
            whole.update(preds[piece].float() if r else preds[piece].double(), target[piece], weights=weights[piece])
        close(value, whole.compute())
        everyone = [torch.empty_like(value) for _ in range(world)]
        dist.all_gather(everyone, value)
        assert all(torch.equal(other, value) or other.isnan().all() for other in everyone), "ranks differ"


def samples_of_all_kinds_meet(rank, world):
    """Ranks with float32, with float64, with soft targets and weights, and without rows; and a sketch."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(40, generator=generator)
    y = torch.randint(0, 2, (40,), generator=generator)
    mine = share(rank, world, 40)
    kinds = [
        (p[mine], y[mine], None),
        (p[mine].double(), y[mine].double(), torch.full_like(y[mine], 2)),
        (p[mine], y[mine] * 0.5, None),
        (p[mine].double(), y[mine], None),
    ]
    everyone = [None] * world
    dist.all_gather_object(everyone, kinds[rank])
    whole = [part for part in everyone if len(part[0])]
    expected = tc.ks(
        torch.cat([part[0].double() for part in whole]),
        torch.cat([part[1].double() for part in whole]),
        task="binary",
        weights=torch.cat([torch.ones(len(part[0])) if part[2] is None else part[2].float() for part in whole]),
    )
    for metric in (tc.KS(task="binary"), tc.KS(task="binary", resolution=2**13)):
        if len(kinds[rank][0]):
            metric.update(kinds[rank][0], kinds[rank][1], weights=kinds[rank][2])
        torch.testing.assert_close(metric.compute(), expected, rtol=1e-4, atol=1e-4)
        if metric.reading.resolution is None:
            close(metric.compute(), expected)


def a_collection_of_samples_and_sums_takes_two_collectives(rank, world):
    metrics = tc.CalibrationCollection([cls(task="binary") for cls in (tc.NLL, tc.ECE, tc.ACE, tc.TCE, tc.KS)])
    preds, target = rows(60)
    mine = share(rank, world, 60)
    if len(target[mine]):
        metrics.update(preds[mine], target[mine])
    values = computed_in(["all_reduce", "all_gather"], metrics)
    for function, value in zip((tc.nll, tc.ece, tc.ace, tc.tce, tc.ks), values.values(), strict=True):
        close(value, function(preds, target, task="binary"))


def replicates_of_all_ranks_add_up_each_rank_drawing_for_its_own_rows(rank, world):
    preds, target = rows(60)
    metrics = tc.CalibrationCollection({"nll": tc.Bootstrapped(tc.NLL(task="binary"), n_replicates=39, seed=5)})
    alone = tc.Bootstrapped(tc.ECE(task="binary"), n_replicates=39, seed=5)
    mine = share(rank, world, 60)
    times = []
    for r in range(world):
        n, streams = len(target[share(r, world, 60)]), torch.arange(39) + (r << 32)
        times.append(poisson_counts(5, streams, torch.arange(n), torch.float64))
    for metric in (metrics, alone):
        if len(target[mine]):
            metric.update(preds[mine], target[mine])
    times = torch.cat(times, -1)
    assert len(times.unique(dim=1).T) > 50, "ranks draw alike"
    close(metrics.compute()["nll"], tc.nll(preds, target, task="binary"))
    close(metrics["nll"].interval().replicates, tc.nll(preds, target, task="binary", weights=times))
    close(alone.interval().replicates, tc.ece(preds, target, task="binary", weights=times))
    dist.barrier()


def groups_of_all_ranks_meet_in_the_collectives_that_there_are(rank, world):
    preds, target = rows(60)
    groups = torch.arange(60) * 7 // 3 % 5
    metrics = tc.CalibrationCollection(
        {cls.__name__: tc.ByGroup(cls(task="binary"), num_groups=6) for cls in (tc.NLL, tc.ECE, tc.KS, tc.TCE)}
    )
    mine = share(rank, world, 60)
    if len(target[mine]):
        metrics.update(preds[mine], target[mine], groups=groups[mine])
    values = computed_in(["all_reduce", "all_gather"], metrics)
    assert metrics["KS"].n().tolist() == groups.bincount(minlength=6).tolist()
    for name, value in values.items():
        for k in range(6):
            close(value[k], getattr(tc, name.lower())(preds[groups == k], target[groups == k], task="binary"))


def evidence_of_all_ranks_is_that_of_one_process(rank, world):
    """Results are bit-identical if sums do not depend on the order: for probabilities that are multiples of 2^-8."""
    generator = torch.Generator().manual_seed(0)
    preds = torch.softmax(2 * torch.randn(90, 3, generator=generator, dtype=torch.float64), -1)
    coarse = (preds * 256).round() / 256
    coarse[:, 0] += 1 - coarse.sum(-1)
    target = torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    copies, shares = torch.arange(90) % 3, torch.rand(90, generator=generator, dtype=torch.float64)
    given = {"task": "multiclass", "num_classes": 3}
    mine = share(rank, world, 90)
    metrics = [(tc.ECE, "top_label"), (tc.MCE, "classwise"), (tc.TCE, "top_label"), (tc.KS, "classwise")]
    for k, (p, weights, is_exact) in enumerate(((coarse, None, True), (coarse, copies, True), (preds, copies, False))):
        for cls, reduction in metrics[k : k + 2] if world == 2 else metrics:  # of two ranks some pairs
            agrees(cls, {**given, "reduction": reduction}, p, target, weights, mine, is_exact)
    agrees(tc.ECE, given, preds, target, shares, mine, is_exact=False)
    agrees(tc.CORP, {"task": "binary"}, coarse[:, 0], (target == 0).long(), None, mine, is_exact=True)


def agrees(cls, given, preds, target, weights, mine, is_exact):
    """Check that the evidence of all ranks together is that of all rows. One rank has no rows."""
    metric, whole = cls(**given), cls(**given, sync_on_compute=False)
    if len(target[mine]):
        metric.update(preds[mine], target[mine], weights=None if weights is None else weights[mine])
    whole.update(preds, target, weights=weights)
    synced, alone = metric.evidence(n_replicates=59), whole.evidence(n_replicates=59)
    for name in ("value", "noise_floor", "p_value", "low", "high"):
        found, expected = getattr(synced, name), getattr(alone, name)
        bound = 0 if is_exact else 1e-9
        torch.testing.assert_close(
            found, expected, rtol=bound, atol=bound, equal_nan=True, msg=lambda what, name=name: f"{cls} {name}: {what}"
        )
    assert metric._is_synced is False, "own state is not restored"


def ranks_that_sync_different_things_are_told(rank, world):
    ece, mce = tc.ECE(task="binary", n_bins=5), tc.ECE(task="binary", n_bins=5, right=True)
    for metric in (ece, mce):
        metric.update(torch.tensor([0.25]), torch.tensor([1]))
    with pytest.raises(RuntimeError, match="all ranks must sync the same metrics"):
        (ece if rank == 0 else mce).compute()
    assert not ece._is_synced
    assert not mce._is_synced
    close(ece.compute(), torch.tensor(0.75, dtype=torch.float64))


def a_collection_syncs_once(rank, world):
    members = [tc.NLL, tc.Brier, tc.ECD, tc.ECE, tc.ESCE, tc.MCE, tc.RMSCE]
    metrics = tc.CalibrationCollection([cls(task="binary") for cls in members])
    preds, target = rows(40)
    mine = share(rank, world, 40)
    metrics.update(preds[mine], target[mine])
    values = computed_in(["all_reduce"], metrics)
    functions = [tc.nll, tc.brier_score, tc.ecd, tc.ece, tc.esce, tc.mce, tc.rmsce]
    for function, value in zip(functions, values.values(), strict=True):
        close(value, function(preds, target, task="binary"))
    assert all(not m._is_synced and m._to_sync for m in metrics.values())
    if rank == 0:
        assert metrics.compute() == values  # once more on one rank alone: from the cache, and no rank waits
    metrics.update(preds[mine], target[mine])
    close(metrics.compute()["NLL"], values["NLL"])


def a_sum_over_a_subgroup_is_the_subgroups(rank, world):
    group = dist.new_group([0, 1])
    if rank < 2:
        metric = tc.ECE(task="binary", process_group=group)
        metric.update(torch.full((1,), 0.5 + 0.25 * rank), torch.tensor([1]))
        close(metric.compute(), torch.tensor((0.5 + 0.25) / 2, dtype=torch.float64))


def forward_synced_on_step_and_a_gather_of_ones_own(rank, world):
    gathered = []

    def gather(x, group=None):
        gathered.append(x)
        return gather_all_tensors(x, group)

    p, zeros = torch.arange(world, dtype=torch.float64) / world, torch.zeros(world, dtype=torch.int64)
    mine = p[rank : rank + 1], zeros[:1]
    on_step = tc.NLL(task="binary", dist_sync_on_step=True)
    close(on_step(*mine), tc.nll(p, zeros, task="binary"))
    for cls, function in ((tc.KS, tc.ks), (tc.NLL, tc.nll)):
        metric = cls(task="binary", dist_sync_fn=gather)
        metric.update(*mine)
        gathered.clear()
        close(metric.compute(), function(p, zeros, task="binary"))
        assert gathered


def main(rank, world, path):
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
    )
    torch.set_num_threads(1)
    every_metric_agrees_with_one_process(rank, world)
    samples_of_all_kinds_meet(rank, world)
    a_collection_of_samples_and_sums_takes_two_collectives(rank, world)
    replicates_of_all_ranks_add_up_each_rank_drawing_for_its_own_rows(rank, world)
    groups_of_all_ranks_meet_in_the_collectives_that_there_are(rank, world)
    evidence_of_all_ranks_is_that_of_one_process(rank, world)
    ranks_that_sync_different_things_are_told(rank, world)
    a_collection_syncs_once(rank, world)
    a_sum_over_a_subgroup_is_the_subgroups(rank, world)
    forward_synced_on_step_and_a_gather_of_ones_own(rank, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
