"""Recorded order-based values: the authors' code of [TCE], uncertainty-calibration, scikit-learn and float64 loops.

The recordings are not part of the project; see `recorded` in conftest. `COVERED` says how each is computed here, and
the counts say that none was missed. Other packages cut equal-mass bins elsewhere: see `array_split`.
"""

import re
from itertools import pairwise

import numpy as np
import oracles
import pytest
import torch
from contract.test_recorded import positive, scores_of
from scipy import stats

import torchcalib as tc

DOGS = ["alexnet", "resnet18"]
GDA = ["50-50", "50-40", "50-60", "01-01", "01-00", "01-02"]


def dogs(recorded, expected, model):
    """What to compute of one system, and its answers by name."""
    name = f"imagenet_dogs_{model}.npz"
    arrays = recorded(name)
    given = {"preds": arrays["probs"], "target": arrays["targets"], "task": "binary"}
    return given, {entry["case"]: entry for entry in expected if entry["file"] == name}


def gda(recorded, expected, case):
    arrays = recorded("sim_gda.npz")
    given = {"preds": arrays[f"p_{case}"], "target": arrays[f"y_{case}"], "task": "binary"}
    return given, {e["case"].rpartition("/")[2]: e for e in expected if e["case"].startswith(f"tce/gda/{case}/")}


def check_table(table, value):
    """Sizes, positives, rejections and edges, as far as they are recorded."""
    assert table.n.tolist() == value["sizes"]
    positives = (table.frequency * table.n).round().tolist()
    assert positives == value.get("positives", positives)
    assert table.rejected.tolist() == value.get("rejected", table.rejected.tolist())
    if "edges" in value:
        assert table.lower.tolist() == pytest.approx(value["edges"][:-1], rel=1e-12, abs=0)
        assert table.upper.tolist() == pytest.approx(value["edges"][1:], rel=1e-12, abs=0)


# [TCE] Table 5: dogs against the rest, 50,000 predictions.


@pytest.mark.parametrize("ties", ["pool", "split"])
@pytest.mark.parametrize("model", DOGS)
def test_recorded_imagenet_dogs_values(recorded, expected, model, ties):
    given, answers = dogs(recorded, expected, model)
    found = {
        "tce": tc.tce(**given, ties=ties),
        "tceq": tc.tce(**given, bins="equal_mass", n_bins=10, ties=ties),
        "ace": tc.ace(**given, n_bins=10, ties=ties),
        "mceq": tc.mce(**given, bins="equal_mass", n_bins=10),
    }
    for name, value in found.items():
        assert value.item() == pytest.approx(answers[name]["value"], abs=answers[name]["tolerance"]), name


@pytest.mark.parametrize("model", DOGS)
def test_recorded_imagenet_dogs_blocks(recorded, expected, model):
    """The default bounds are those of the recording: N // 20 = 2,500 and N // 5 = 10,000."""
    given, answers = dogs(recorded, expected, model)
    check_table(tc.tce_table(**given), answers["bins"]["value"])
    check_table(tc.tce_table(**given, n_min=2500, n_max=10000, variant="paper"), answers["bins_alg3"]["value"])
    merged = tc.tce(**given, variant="paper").item()
    assert merged == pytest.approx(answers["bins_alg3"]["value"]["tce"], abs=answers["tce"]["tolerance"])


@pytest.mark.parametrize("model", DOGS)
def test_recorded_imagenet_dogs_quantile_bins(recorded, expected, model):
    given, answers = dogs(recorded, expected, model)
    table = tc.tce_table(**given, bins="equal_mass", n_bins=10)
    check_table(table, {"sizes": [5000] * 10, **answers["tceq_rej"]["value"]})


@pytest.mark.parametrize("entry", ["tce_WRONG_tests", "tceq_WRONG_tests"])
@pytest.mark.parametrize("model", DOGS)
def test_recorded_values_of_other_tests_are_not_ours(recorded, expected, model, entry):
    """Clopper-Pearson, z and t tests, and a test of bin means alone, give other values."""
    given, answers = dogs(recorded, expected, model)
    given |= {"bins": "equal_mass", "n_bins": 10} if entry.startswith("tceq") else {"bins": "pava_bc"}
    others = answers[entry]["value"]
    value = tc.tce(**given).item()
    assert value == pytest.approx(others["exact"], abs=5e-4)
    for name in ("clopper_pearson", "ztest", "ttest_repo", "bin_mean_only"):
        assert abs(value - others[name]) > 5e-3, name


def t_rejections(given, table, deviation):
    """Percent of predictions that a t-test of their bin's labels rejects, by the textbook formula with scipy's tail."""
    count, first = 0, 0
    scores = given["preds"].sort().values.numpy()
    for n, mean in zip(table.n.long().tolist(), table.frequency.tolist(), strict=True):
        with np.errstate(divide="ignore"):
            t = np.abs(scores[first : first + n] - mean) / (deviation(n, mean) / np.sqrt(n))
        count += (2 * stats.t.sf(t, n - 1) <= 0.05).sum()
        first += n
    return 100 * count / first


@pytest.mark.parametrize("bins", ["pava_bc", "equal_mass"])
@pytest.mark.parametrize("model", DOGS)
def test_slow_formula_of_the_t_test_and_what_the_published_code_makes_of_it(recorded, expected, model, bins):
    """The authors divide by the variance of the labels where the t-test divides by their standard deviation."""
    given, answers = dogs(recorded, expected, model)
    given |= {"bins": bins, "n_bins": 10}
    table = tc.tce_table(**given, test="t")
    value = t_rejections(given, table, lambda n, mean: np.sqrt(mean * (1 - mean) * n / (n - 1)))
    assert tc.tce(**given, test="t").item() == pytest.approx(value, abs=1e-9)
    assert table.rejected.sum().item() / 500 == pytest.approx(value, abs=1e-9)
    published = answers["tce_WRONG_tests" if bins == "pava_bc" else "tceq_WRONG_tests"]["value"]["ttest_repo"]
    assert t_rejections(given, table, lambda n, mean: mean * (1 - mean)) == pytest.approx(published, abs=5e-4)


# [TCE] Table 2: six simulated cases, 6,000 predictions each.


@pytest.mark.parametrize("case", GDA)
def test_recorded_gaussian_discriminant_values(recorded, expected, case):
    given, answers = gda(recorded, expected, case)
    found = {
        "tce": tc.tce(**given, n_min=300, n_max=1200),
        "tceq": tc.tce(**given, bins="equal_mass", n_bins=10),
        "ace": tc.ace(**given, n_bins=10),
        "mceq": tc.mce(**given, bins="equal_mass", n_bins=10),
    }
    for name, value in found.items():
        assert value.item() == pytest.approx(answers[name]["value"], abs=answers[name]["tolerance"]), name
    check_table(tc.tce_table(**given), answers["bins"]["value"])


@pytest.mark.parametrize("case", GDA)
def test_recorded_gaussian_discriminant_literal_algorithm_3(recorded, expected, case):
    given, answers = gda(recorded, expected, case)
    answer = answers["tce_alg3_literal"]
    check_table(tc.tce_table(**given, variant="paper"), answer["value"])
    value = tc.tce(**given, variant="paper").item()
    assert value == pytest.approx(answer["value"]["tce"], abs=answer["tolerance"])


def test_paper_value_that_tells_the_variants_apart(recorded, expected):
    """1 % positives against a model of 0 %: [TCE] Table 2 prints 95.5; merging equal means would give 100."""
    given, _ = gda(recorded, expected, "01-00")
    assert tc.tce(**given).item() == pytest.approx(95.5, abs=1e-9)
    assert tc.tce(**given, variant="paper").item() == pytest.approx(100, abs=1e-9)


# Real systems.


def array_split(scores, n_bins=15):
    """Edges of uncertainty-calibration: midpoints between the parts of `numpy.array_split`, the larger parts first."""
    parts = np.array_split(np.sort(scores.double().numpy()), n_bins)
    return np.unique([0.0, *((a[-1] + b[0]) / 2 for a, b in pairwise(parts)), 1.0]).tolist()


def absolute_gap(b):
    return b.gap.abs()


def over_their_bins(given, norm):
    return tc.gce(**given, loss=absolute_gap, bins=array_split(given["preds"]), right=True, norm=norm)


def debiased_over_their_bins(given):
    """From the table of bins, by the formula of the loops."""
    table = tc.tce_table(**given, bins=array_split(given["preds"]), right=True)
    columns = (table.n.tolist(), table.confidence.tolist(), table.frequency.tolist())
    rows = [(b, *row, None) for b, row in enumerate(zip(*columns, strict=True)) if row[0]]
    return torch.tensor(oracles.rmsce(rows, debiased=True), dtype=torch.float64)


def top_label(arrays):
    """The top label as a binary claim of its own."""
    confidence, claimed = torch.log_softmax(scores_of(arrays)["preds"], -1).exp().max(-1)
    return {"preds": confidence, "target": (claimed == arrays["targets"]).long(), "task": "binary"}


def marginal(arrays):
    """Root of the mean, over classes, of the debiased square."""
    probs = torch.log_softmax(scores_of(arrays)["preds"], -1).exp()
    columns = [
        {"preds": column, "target": (arrays["targets"] == k).long(), "task": "binary"}
        for k, column in enumerate(probs.unbind(-1))
    ]
    return torch.stack([debiased_over_their_bins(column) for column in columns]).square().mean().sqrt()


COVERED = [
    (r"bin/ks_(?:stable|tie_safe)", lambda a: tc.ks(**positive(a))),
    (r"bin/kuiper_tie_safe", lambda a: tc.ks(**positive(a), norm="range")),
    (r"bin/corp_(brier|log)", lambda a, score: tc.corp(**positive(a), score={"log": "nll"}.get(score, score))),
    (r"bin/uc_ece_eqmass15", lambda a: over_their_bins(positive(a), "l1")),
    (r"bin/uc_rmsce_plugin_eqmass15", lambda a: over_their_bins(positive(a), "l2")),
    (r"bin/uc_rmsce_debiased_eqmass15", lambda a: debiased_over_their_bins(positive(a))),
    (r"multi/ks_top", lambda a: tc.ks(**scores_of(a))),
    (r"multi/top_eqmass15", lambda a: tc.ace(**scores_of(a))),
    (r"multi/classwise_eqmass15_mean", lambda a: tc.ace(**scores_of(a), reduction="classwise")),
    (r"multi/uc_top_rmsce_debiased15", lambda a: debiased_over_their_bins(top_label(a))),
    (r"multi/uc_marginal_rmsce_debiased15", marginal),
]  # fmt: skip


def test_recorded_real_systems(recorded, expected):
    checked = dict.fromkeys((pattern for pattern, _ in COVERED), 0)
    for entry in expected:
        for pattern, compute in COVERED:
            match = re.fullmatch(pattern, entry["case"])
            if match and entry["value"] is not None:
                found = compute(recorded(entry["file"]), *match.groups())
                wanted = entry["value"]
                if isinstance(wanted, dict):
                    found, wanted = torch.stack(found), [wanted[name] for name in found._fields]
                torch.testing.assert_close(
                    found.double(), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=entry["tolerance"],
                    msg=lambda m, e=entry: f"{e}: {m}",
                )  # fmt: skip
                checked[pattern] += 1
    assert list(checked.values()) == [4, 2, 4, 2, 2, 2, 5, 5, 5, 5, 4]  # cifar100 has no marginal value


def test_no_recorded_entry_of_this_family_is_missed(expected):
    """Every entry whose name speaks of order-based quantities is read above, by name or by a pattern."""
    of_dogs = {"tce", "tceq", "tceq_rej", "bins", "bins_alg3", "ace", "mceq", "tce_WRONG_tests", "tceq_WRONG_tests"}
    of_gda = {"tce", "tceq", "ace", "mceq", "bins", "tce_alg3_literal"}
    others = {"ece", "mce", "ties"}  # equal-width bins, in test_golden; and what the file holds
    for entry in expected:
        file, name = entry["file"] or "", entry["case"]
        if file.startswith("imagenet_dogs"):
            assert name in of_dogs | others, name
        elif file == "sim_gda.npz":
            assert name.rpartition("/")[2] in of_gda | others, name
        elif re.search(r"eqmass|_ks|/ks|kuiper|corp|uc_.*15", name) and name != "bin/uc_ece_eqwidth15":
            assert any(re.fullmatch(pattern, name) for pattern, _ in COVERED), name
    dogs_entries = [e for e in expected if (e["file"] or "").startswith("imagenet_dogs") and e["case"] in of_dogs]
    gda_entries = [e for e in expected if e["file"] == "sim_gda.npz" and e["case"].rpartition("/")[2] in of_gda]
    assert (len(dogs_entries), len(gda_entries)) == (2 * len(of_dogs), 6 * len(of_gda))
