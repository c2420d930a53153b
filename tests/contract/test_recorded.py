"""Recorded results of the authors' code, scipy, scikit-learn and float64 loops, on real and simulated predictions.

The recordings are not part of the project; see `recorded` in conftest. `COVERED` maps each recorded entry to its
computation, and the final counts ensure that no entry was skipped. Other packages define equal-mass bins
differently: see `array_split`.
"""

import re
from itertools import pairwise

import numpy as np
import oracles
import pytest
import torch

import torchcalib as tc
import torchcalib.functional as F

SIDE = {"left_closed": False, "right_closed": True}
SHORT = {"with_intervals": False, "with_calibration": False}  # report without intervals and calibrators
NORM = {"l1": F.ece, "l2": F.rmsce, "max": F.mce}


def scores_of(arrays):
    """Return log-probabilities of classes. The log-softmax of recorded logits was computed in their own precision."""
    key = next(key for key in ("logits", "log_probs") if key in arrays)
    return {"preds": arrays[key], "target": arrays["targets"], "task": "multiclass", "from_logits": True}


def positive(arrays):
    """Return P(class 1) of a two-class system."""
    log_probs = torch.log_softmax(arrays["log_probs"], -1)
    return {"preds": log_probs[:, 1].exp(), "target": arrays["targets"], "task": "binary"}


def _naive(arrays, score):
    target = arrays["targets"].long()
    share = torch.bincount(target).double() / len(target)
    return score(share.expand(len(target), -1), target, task="multiclass")


COSTS = {  # [EPSR] sec. 3
    "01": tc.CostMatrix.zero_one,
    "01r": lambda c: tc.CostMatrix.zero_one(c).with_reject(0.1),
    "imb": tc.CostMatrix.imbalanced,
}


def array_split(scores, n_bins=15):
    """Return the bin edges of uncertainty-calibration: midpoints between the parts of `numpy.array_split`."""
    parts = np.array_split(np.sort(scores.double().numpy()), n_bins)
    return np.unique([0.0, *((a[-1] + b[0]) / 2 for a, b in pairwise(parts)), 1.0]).tolist()


def absolute_gap(b):
    return b.gap.abs()


def over_their_bins(given, norm):
    return F.gce(**given, loss=absolute_gap, bins=array_split(given["preds"]), right=True, norm=norm)


def debiased_over_their_bins(given):
    """Debiased RMSCE of the recorded package, which subtracts f (1 - f) / (n - 1) from each squared gap."""
    table = F.tce_table(**given, bins=array_split(given["preds"]), right=True)
    columns = (table.n.tolist(), table.confidence.tolist(), table.frequency.tolist())
    rows = [
        (b, n, c, f, f * (1 - f) / (n - 1) if n >= 2 else 0)
        for b, (n, c, f) in enumerate(zip(*columns, strict=True))
        if n
    ]
    return torch.tensor(oracles.rmsce(rows, debiased=True), dtype=torch.float64)


def top_label(arrays):
    """Return the top label as a binary event."""
    confidence, claimed = torch.log_softmax(scores_of(arrays)["preds"], -1).exp().max(-1)
    return {"preds": confidence, "target": (claimed == arrays["targets"]).long(), "task": "binary"}


def marginal(arrays):
    """Root mean square over classes of the debiased class-wise errors."""
    probs = torch.log_softmax(scores_of(arrays)["preds"], -1).exp()
    columns = [
        {"preds": column, "target": (arrays["targets"] == k).long(), "task": "binary"}
        for k, column in enumerate(probs.unbind(-1))
    ]
    return torch.stack([debiased_over_their_bins(column) for column in columns]).square().mean().sqrt()


COVERED = [
    (r"bin/bin(10|15)_(l1|l2|max)_(left_closed|right_closed)",
     lambda a, b, norm, side: NORM[norm](**positive(a), n_bins=int(b), right=SIDE[side])),
    (r"bin/uc_ece_eqwidth15", lambda a: F.ece(**positive(a), n_bins=15)),
    (r"bin/base_rate", lambda a: positive(a)["target"].double().mean()),
    (r"bin/n_exact_(zero|one)",
     lambda a, which: (positive(a)["preds"] == ("zero", "one").index(which)).sum()),
    (r"bin/smECE", lambda a: F.smece(**positive(a))),
    (r"bin/smECE_width", lambda a: F.smece_width(**positive(a))),
    (r"multi/smECE_top", lambda a: F.smece(**scores_of(a))),
    (r"bin/spiegelhalter_z", lambda a: F.spiegelhalter(**positive(a))),
    (r"bin/mean_p", lambda a: positive(a)["preds"].double().mean()),
    (r"bin/brier_binary", lambda a: F.brier_score(**positive(a))),
    (r"bin/ecd_eq15", lambda a: F.ecd(**positive(a))),
    (r"bin/ecd_finite", lambda a: F.ecd(**positive(a)).isfinite()),
    (r"bin/esce_any_bins.*", lambda a: F.esce(**positive(a), n_bins=3)),
    (r"multi/top_bin(10|15)_(l1|l2|max)_(left_closed|right_closed)",
     lambda a, b, norm, side: NORM[norm](**scores_of(a), n_bins=int(b), right=SIDE[side])),
    (r"multi/classwise_ece15_mean", lambda a: F.ece(**scores_of(a), mode="classwise")),
    (r"multi/classwise_ece15_mean_right_closed",
     lambda a: F.ece(**scores_of(a), mode="classwise", right=True)),
    (r"multi/classwise_ece15_first5",
     lambda a: F.ece(**scores_of(a), mode="classwise", average=None)[:5]),
    (r"multi/nll", lambda a: F.nll(**scores_of(a))),
    (r"multi/nce", lambda a: F.nll(**scores_of(a), normalize="prior")),
    (r"multi/brier_sum", lambda a: F.brier_score(**scores_of(a))),
    (r"multi/brier_over_K", lambda a: F.brier_score(**scores_of(a), normalize="classes")),
    (r"multi/nbs", lambda a: F.brier_score(**scores_of(a), normalize="prior")),
    (r"multi/nll_naive", lambda a: _naive(a, F.nll)),
    (r"multi/brier_naive_over_K", lambda a: _naive(a, F.brier_score) / (a["targets"].max() + 1)),
    (r"multi/ecd_eq12", lambda a: F.ecd(**scores_of(a))),
    (r"multi/accuracy", lambda a: torch.tensor(tc.report(**scores_of(a), **SHORT)["accuracy"], dtype=torch.float64)),
    (r"bin/ks_(?:stable|tie_safe)", lambda a: F.ks(**positive(a))),
    (r"bin/kuiper_tie_safe", lambda a: F.ks(**positive(a), norm="range")),
    (r"bin/corp_(brier|log)", lambda a, score: F.corp(**positive(a), score={"log": "nll"}.get(score, score))),
    (r"bin/uc_ece_eqmass15", lambda a: over_their_bins(positive(a), "l1")),
    (r"bin/uc_rmsce_plugin_eqmass15", lambda a: over_their_bins(positive(a), "l2")),
    (r"bin/uc_rmsce_debiased_eqmass15", lambda a: debiased_over_their_bins(positive(a))),
    (r"multi/ks_top", lambda a: F.ks(**scores_of(a))),
    (r"multi/top_eqmass15", lambda a: F.ace(**scores_of(a))),
    (r"multi/classwise_eqmass15_mean", lambda a: F.ace(**scores_of(a), mode="classwise")),
    (r"multi/uc_top_rmsce_debiased15", lambda a: debiased_over_their_bins(top_label(a))),
    (r"multi/uc_marginal_rmsce_debiased15", marginal),
]  # fmt: skip


SLOW = [pytest.mark.extended]  # many rows or classes
SYSTEMS = {
    "adrenal_resnet50": [],
    "sst2_gpt2": [],
    "agnews_gpt2": [],
    "cifar10_resnet20": SLOW,
    "cifar100_resnet20": SLOW,
}


def computed_by(case):
    """Yield the place in `COVERED` and the groups of each pattern that matches a case."""
    for k, (pattern, _) in enumerate(COVERED):
        if match := re.fullmatch(pattern, case):
            yield k, match.groups()


def entries_of(expected, systems):
    names = {f"{name}.npz" for name in systems}
    return [e for e in expected if e["file"] in names and e["value"] is not None and any(computed_by(e["case"]))]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in SYSTEMS.items()])
def test_values_of_real_systems_equal_recordings(recorded, expected, name):
    for entry in entries_of(expected, [name]):
        for k, groups in computed_by(entry["case"]):
            found, wanted = COVERED[k][1](recorded(entry["file"]), *groups), entry["value"]
            if isinstance(wanted, dict):
                found, wanted = torch.stack(found), [wanted[name] for name in found._fields]
            assert found.tolist() == pytest.approx(wanted, rel=0, abs=entry["tolerance"]), entry


def test_every_recorded_entry_of_a_value_is_computed(expected):
    entries = entries_of(expected, SYSTEMS)
    assert len(entries) == 213
    assert {k for entry in entries for k, _ in computed_by(entry["case"])} == set(range(len(COVERED)))
    names = {entry["case"] for entry in expected if entry["case"].startswith(("bin/", "multi/"))}
    assert len(names) == 62
    assert not [name for name in names if not any(computed_by(name))]


def test_recorded_certain_predictions_do_not_give_nan(recorded):
    arrays = recorded("imagenet_dogs_alexnet.npz")
    assert (arrays["probs"] == 1).sum() == 27
    assert F.ecd(arrays["probs"], arrays["targets"], task="binary").item() == pytest.approx(-0.0109003639, abs=1e-10)


@pytest.mark.parametrize("sigma", ["0", "0p5", "2"])
def test_ecd_table_of_bins_equals_recordings(recorded, expected, sigma):
    """[ECD] sec. V-A, simulated: counts, |gap|, gap and entropic calibration difference of ten bins, and totals."""
    arrays = recorded("sim_ecd.npz")
    answer = next(entry["value"] for entry in expected if entry["case"] == f"ecd/fixture/{sigma}")
    p, y = arrays[f"p_{sigma}"], arrays[f"y_{sigma}"]
    table = F.calibration_curve(p, y, task="binary", n_bins=10).to_dict()
    assert table["n"].tolist() == answer["cnt"]
    assert abs(table["gap"]) == pytest.approx(answer["ece"], abs=1e-10)
    assert table["gap"] == pytest.approx(answer["esce"], abs=1e-10)
    assert table["ecd"] == pytest.approx(answer["ecd"], abs=1e-10)
    assert (table["share"] * table["ecd"]).sum() == pytest.approx(answer["ECD"], abs=1e-10)
    assert F.ece(p, y, task="binary", n_bins=10).item() == pytest.approx(answer["ECE"], abs=1e-10)
    assert F.esce(p, y, task="binary", n_bins=10).item() == pytest.approx(answer["ESCE"], abs=1e-10)
    assert F.ecd(p, y, task="binary").item() == pytest.approx(answer["ECD"], abs=1e-10)


@pytest.mark.parametrize("k", [2, 10])
@pytest.mark.parametrize("system", ["cal", "mcp", "mcs", "mcps"])
def test_values_of_simulated_systems_equal_recordings(recorded, expected, k, system):
    """[EPSR] sec. 3: normalised cross-entropy, Brier score and Bayes risks, and ECE in percent over (a, b] bins."""
    arrays = recorded(f"sim_ferrer_k{k}.npz")
    answer = next(e["value"] for e in expected if e["case"] == f"ferrer/synthetic/K{k}|{system}")
    given = {"preds": arrays[system], "target": arrays["targets"], "task": "multiclass", "from_logits": True}
    assert F.nll(**given, normalize="prior").item() == pytest.approx(answer["nce"], abs=1e-6)
    assert F.brier_score(**given, normalize="prior").item() == pytest.approx(answer["nbs"], abs=1e-6)
    assert 100 * F.ece(**given, right=True).item() == pytest.approx(answer["eceMC15"], abs=2e-4)
    if k == 2:
        of_class_1 = F.ece(arrays[system][:, 1].exp(), arrays["targets"], task="binary", right=True)
        assert 100 * of_class_1.item() == pytest.approx(answer["eceBIN15"], abs=2e-4)
    counts = next(e["value"] for e in expected if e["case"] == f"ferrer/synthetic/K{k}|counts")
    assert arrays["targets"].bincount().tolist() == counts
    for costs, make in COSTS.items():
        risk = F.bayes_risk(**given, cost=make(k), normalize="prior")
        assert risk.item() == pytest.approx(answer[f"nrisk{costs}"], abs=1e-6)
