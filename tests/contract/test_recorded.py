"""Recorded outputs of the authors' own code, scipy, scikit-learn and float64 loops, on real and simulated predictions.

The recordings are not part of the project; see `recorded` in conftest. Every entry that these metrics cover is checked:
`COVERED` says how an entry's metric is computed here, and the counts at the end say that none was missed.
"""

import re

import pytest
import torch

import torchcalib as tc

SIDE = {"left_closed": False, "right_closed": True}
SHORT = {"with_intervals": False, "with_calibration": False}  # a report of values alone
NORM = {"l1": tc.ece, "l2": tc.rmsce, "max": tc.mce}


def scores_of(arrays):
    """Multi-class log-probabilities; recorded logits had their log-softmax taken in their own precision."""
    key = next(key for key in ("logits", "log_probs") if key in arrays)
    return {"preds": arrays[key], "target": arrays["targets"], "task": "multiclass", "from_logits": True}


def positive(arrays):
    """P(class 1) of a two-class system."""
    log_probs = torch.log_softmax(arrays["log_probs"], -1)
    return {"preds": log_probs[:, 1].exp(), "target": arrays["targets"], "task": "binary"}


def _naive(arrays, score):
    target = arrays["targets"].long()
    share = torch.bincount(target).double() / len(target)
    return score(share.expand(len(target), -1), target, task="multiclass")


def num_classes(arrays):
    return next(arrays[key] for key in ("logits", "log_probs", "cal") if key in arrays).shape[-1]


COSTS = {  # [EPSR] sec. 3
    "01": tc.CostMatrix.zero_one,
    "01r": lambda c: tc.CostMatrix.zero_one(c).with_reject(0.1),
    "imb": tc.CostMatrix.imbalanced,
}


COVERED = [
    (r"bin/bin(10|15)_(l1|l2|max)_(left_closed|right_closed)",
     lambda a, b, norm, side: NORM[norm](**positive(a), n_bins=int(b), right=SIDE[side])),
    (r"bin/uc_ece_eqwidth15", lambda a: tc.ece(**positive(a), n_bins=15)),
    (r"bin/base_rate", lambda a: positive(a)["target"].double().mean()),
    (r"bin/n_exact_(zero|one)",
     lambda a, which: (positive(a)["preds"] == ("zero", "one").index(which)).sum()),
    (r"bin/smECE", lambda a: tc.smece(**positive(a))),
    (r"bin/smECE_width", lambda a: tc.smece_width(**positive(a))),
    (r"multi/smECE_top", lambda a: tc.smece(**scores_of(a))),
    (r"bin/spiegelhalter_z", lambda a: tc.spiegelhalter(**positive(a)).z),
    (r"bin/mean_p", lambda a: positive(a)["preds"].double().mean()),
    (r"bin/brier_binary", lambda a: tc.brier_score(**positive(a))),
    (r"bin/ecd_eq15", lambda a: tc.ecd(**positive(a))),
    (r"bin/ecd_finite", lambda a: tc.ecd(**positive(a)).isfinite()),
    (r"bin/esce_any_bins.*", lambda a: tc.esce(**positive(a), n_bins=3)),
    (r"multi/top_bin(10|15)_(l1|l2|max)_(left_closed|right_closed)",
     lambda a, b, norm, side: NORM[norm](**scores_of(a), n_bins=int(b), right=SIDE[side])),
    (r"multi/classwise_ece15_mean", lambda a: tc.ece(**scores_of(a), reduction="classwise")),
    (r"multi/classwise_ece15_mean_right_closed",
     lambda a: tc.ece(**scores_of(a), reduction="classwise", right=True)),
    (r"multi/classwise_ece15_first5",
     lambda a: tc.ece(**scores_of(a), reduction="classwise", average=None)[:5]),
    (r"multi/nll", lambda a: tc.nll(**scores_of(a))),
    (r"multi/nce", lambda a: tc.nll(**scores_of(a), normalize="prior")),
    (r"multi/brier_sum", lambda a: tc.brier_score(**scores_of(a))),
    (r"multi/brier_over_K", lambda a: tc.brier_score(**scores_of(a), normalize="classes")),
    (r"multi/nbs", lambda a: tc.brier_score(**scores_of(a), normalize="prior")),
    (r"multi/nll_naive", lambda a: _naive(a, tc.nll)),
    (r"multi/brier_naive_over_K", lambda a: _naive(a, tc.brier_score) / (a["targets"].max() + 1)),
    (r"multi/ecd_eq12", lambda a: tc.ecd(**scores_of(a))),
    (r"multi/accuracy", lambda a: torch.tensor(tc.report(**scores_of(a), **SHORT)["accuracy"], dtype=torch.float64)),
    (r"raw/ce", lambda a: tc.nll(**scores_of(a))),
    (r"raw/nce", lambda a: tc.nll(**scores_of(a), normalize="prior")),
    (r"raw/bs", lambda a: tc.brier_score(**scores_of(a), normalize="classes")),
    (r"raw/nbs", lambda a: tc.brier_score(**scores_of(a), normalize="prior")),
    (r"raw/(n?)risk(01r?|imb)",
     lambda a, normalized, costs: tc.bayes_risk(
         **scores_of(a), cost=COSTS[costs](num_classes(a)), normalize="prior" if normalized else None)),
    (r"raw/eceMC(10|15)", lambda a, b: 100 * tc.ece(**scores_of(a), n_bins=int(b), right=True)),
    (r"raw/eceBIN(10|15)", lambda a, b: 100 * tc.ece(**positive(a), n_bins=int(b), right=True)),
]  # fmt: skip


def test_recorded_real_systems(recorded, expected):
    checked, used = 0, set()
    for entry in expected:
        if entry["file"] is None or entry["file"].startswith(("sim_", "imagenet")):
            continue
        for pattern, compute in COVERED:
            if match := re.fullmatch(pattern, entry["case"]):
                value = compute(recorded(entry["file"]), *match.groups())
                wanted = torch.tensor(entry["value"], dtype=torch.float64)
                torch.testing.assert_close(
                    value.double(), wanted, rtol=0, atol=entry["tolerance"], msg=lambda m, e=entry: f"{e}: {m}"
                )
                checked += 1
                used.add(pattern)
    assert checked == 237
    assert used == {pattern for pattern, _ in COVERED}


@pytest.mark.parametrize("model", ["alexnet", "resnet18"])
def test_recorded_imagenet_dogs(recorded, expected, model):
    arrays = recorded(f"imagenet_dogs_{model}.npz")
    given = {"preds": arrays["probs"], "target": arrays["targets"], "task": "binary"}
    answers = {entry["case"]: entry for entry in expected if entry["file"] == f"imagenet_dogs_{model}.npz"}
    for name, function in (("ece", tc.ece), ("mce", tc.mce)):
        assert function(**given, n_bins=10).item() == pytest.approx(answers[name]["value"], abs=1e-9)


def test_recorded_certain_predictions_are_not_nan(recorded):
    arrays = recorded("imagenet_dogs_alexnet.npz")
    assert (arrays["probs"] == 1).sum() == 27
    assert tc.ecd(arrays["probs"], arrays["targets"], task="binary").item() == pytest.approx(-0.0109003639, abs=1e-10)


def test_recorded_gaussian_discriminant_cases(recorded, expected):
    arrays = recorded("sim_gda.npz")
    checked = 0
    for entry in expected:
        if match := re.fullmatch(r"tce/gda/(.*)/(ece|mce)", entry["case"]):
            case, name = match.groups()
            keys = {key[2:].replace("_", "-"): key for key in arrays if key.startswith("p_")}
            p = arrays[keys[case]]
            y = arrays["y" + keys[case][1:]]
            function = {"ece": tc.ece, "mce": tc.mce}[name]
            assert function(p, y, task="binary", n_bins=10).item() == pytest.approx(entry["value"], abs=1e-9)
            checked += 1
    assert checked == 12


@pytest.mark.parametrize("sigma", ["0", "0p5", "2"])
def test_recorded_ecd_table_of_bins(recorded, expected, sigma):
    """[ECD] sec. V-A, simulated: counts, |gap|, gap and mean ECD of ten bins, and the totals."""
    arrays = recorded("sim_ecd.npz")
    answer = next(entry["value"] for entry in expected if entry["case"] == f"ecd/fixture/{sigma}")
    p, y = arrays[f"p_{sigma}"], arrays[f"y_{sigma}"]
    table = tc.bin_table(p, y, task="binary", n_bins=10).to_dict()
    assert table["n"].tolist() == answer["cnt"]
    assert abs(table["gap"]) == pytest.approx(answer["ece"], abs=1e-10)
    assert table["gap"] == pytest.approx(answer["esce"], abs=1e-10)
    assert table["ecd"] == pytest.approx(answer["ecd"], abs=1e-10)
    assert (table["share"] * table["ecd"]).sum() == pytest.approx(answer["ECD"], abs=1e-10)
    assert tc.ece(p, y, task="binary", n_bins=10).item() == pytest.approx(answer["ECE"], abs=1e-10)
    assert tc.esce(p, y, task="binary", n_bins=10).item() == pytest.approx(answer["ESCE"], abs=1e-10)
    assert tc.ecd(p, y, task="binary").item() == pytest.approx(answer["ECD"], abs=1e-10)


@pytest.mark.parametrize("k", [2, 10])
@pytest.mark.parametrize("system", ["cal", "mcp", "mcs", "mcps"])
def test_recorded_simulated_systems(recorded, expected, k, system):
    """[EPSR] sec. 3: NCE, NBS, normalised Bayes risks, and ECE in percent over (a, b] bins."""
    arrays = recorded(f"sim_ferrer_k{k}.npz")
    answer = next(e["value"] for e in expected if e["case"] == f"ferrer/synthetic/K{k}|{system}")
    given = {"preds": arrays[system], "target": arrays["targets"], "task": "multiclass", "from_logits": True}
    assert tc.nll(**given, normalize="prior").item() == pytest.approx(answer["nce"], abs=1e-6)
    assert tc.brier_score(**given, normalize="prior").item() == pytest.approx(answer["nbs"], abs=1e-6)
    assert 100 * tc.ece(**given, right=True).item() == pytest.approx(answer["eceMC15"], abs=2e-4)
    if k == 2:
        of_class_1 = tc.ece(arrays[system][:, 1].exp(), arrays["targets"], task="binary", right=True)
        assert 100 * of_class_1.item() == pytest.approx(answer["eceBIN15"], abs=2e-4)
    counts = next(e["value"] for e in expected if e["case"] == f"ferrer/synthetic/K{k}|counts")
    assert arrays["targets"].bincount().tolist() == counts
    for costs, make in COSTS.items():
        risk = tc.bayes_risk(**given, cost=make(k), normalize="prior")
        assert risk.item() == pytest.approx(answer[f"nrisk{costs}"], abs=1e-6)


def test_no_recorded_entry_of_real_systems_is_missed(expected):
    """Every `bin/` and `multi/` entry is read here or, where the order of samples matters, in test_recorded_ranked."""
    from contract.test_recorded_ranked import COVERED as ORDERED  # which imports this module

    names = {entry["case"] for entry in expected if entry["case"].startswith(("bin/", "multi/"))}
    assert len(names) == 62
    missed = {name for name in names if not any(re.fullmatch(pattern, name) for pattern, _ in COVERED + ORDERED)}
    assert not missed
