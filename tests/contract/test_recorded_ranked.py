"""Recorded values of the test-based calibration error (TCE): the authors' code of [TCE], and scipy.

The recordings are not part of the project; see `recorded` in conftest. The last test ensures that none is skipped.
"""

from collections import Counter

import numpy as np
import pytest
from scipy import stats

import torchcalib.functional as F

DOGS = ["alexnet", "resnet18"]
GDA = ["50-50", "50-40", "50-60", "01-01", "01-00", "01-02"]


def dogs(recorded, expected, model):
    """Return predictions and targets of one system, and its recorded answers by name."""
    name = f"imagenet_dogs_{model}.npz"
    arrays = recorded(name)
    given = {"preds": arrays["probs"], "target": arrays["targets"], "task": "binary"}
    return given, {entry["case"]: entry for entry in expected if entry["file"] == name}


def gda(recorded, expected, case):
    arrays = recorded("sim_gda.npz")
    given = {"preds": arrays[f"p_{case}"], "target": arrays[f"y_{case}"], "task": "binary"}
    return given, {e["case"].rpartition("/")[2]: e for e in expected if e["case"].startswith(f"tce/gda/{case}/")}


def check_values(given, answers, ties="pool", **bounds):
    """Compare errors over ten bins of equal width or equal mass, and over the blocks of the test."""
    mass = {"bins": "equal_mass", "n_bins": 10}
    found = {
        "ece": F.ece(**given, n_bins=10),
        "mce": F.mce(**given, n_bins=10),
        "tce": F.tce(**given, ties=ties, **bounds),
        "tceq": F.tce(**given, **mass, ties=ties),
        "ace": F.ace(**given, n_bins=10, ties=ties),
        "mceq": F.mce(**given, **mass),
    }
    for name, value in found.items():
        assert value.item() == pytest.approx(answers[name]["value"], abs=answers[name]["tolerance"]), name


def check_table(table, value):
    """Compare sizes, positives, rejections and edges, if they are recorded."""
    assert table.n.tolist() == value["sizes"]
    positives = (table.frequency * table.n).round().tolist()
    assert positives == value.get("positives", positives)
    assert table.rejected.tolist() == value.get("rejected", table.rejected.tolist())
    if "edges" in value:
        assert table.lower.tolist() == pytest.approx(value["edges"][:-1], rel=1e-12, abs=0)
        assert table.upper.tolist() == pytest.approx(value["edges"][1:], rel=1e-12, abs=0)


# [TCE] Table 5: dogs of ImageNet against all other classes, 50,000 predictions


@pytest.mark.parametrize("ties", ["pool", "split"])
@pytest.mark.parametrize("model", DOGS)
def test_values_for_imagenet_dogs_equal_recordings(recorded, expected, model, ties):
    given, answers = dogs(recorded, expected, model)
    check_values(given, answers, ties=ties)


@pytest.mark.parametrize("model", DOGS)
def test_blocks_for_imagenet_dogs_equal_recordings(recorded, expected, model):
    """The default bounds equal those of the recording: N // 20 = 2,500 and N // 5 = 10,000."""
    given, answers = dogs(recorded, expected, model)
    check_table(F.tce_table(**given), answers["bins"]["value"])
    check_table(F.tce_table(**given, n_min=2500, n_max=10000, variant="paper"), answers["bins_alg3"]["value"])
    merged = F.tce(**given, variant="paper").item()
    assert merged == pytest.approx(answers["bins_alg3"]["value"]["tce"], abs=answers["tce"]["tolerance"])
    table = F.tce_table(**given, bins="equal_mass", n_bins=10)
    check_table(table, {"sizes": [5000] * 10, **answers["tceq_rej"]["value"]})


@pytest.mark.parametrize("entry", ["tce_WRONG_tests", "tceq_WRONG_tests"])
@pytest.mark.parametrize("model", DOGS)
def test_recorded_values_of_other_tests_differ_from_the_exact_test(recorded, expected, model, entry):
    """Clopper-Pearson, z and t tests, and a test of bin means alone, give other values."""
    given, answers = dogs(recorded, expected, model)
    given |= {"bins": "equal_mass", "n_bins": 10} if entry.startswith("tceq") else {"bins": "pava_bc"}
    others = answers[entry]["value"]
    value = F.tce(**given).item()
    assert value == pytest.approx(others["exact"], abs=5e-4)
    for name in ("clopper_pearson", "ztest", "ttest_repo", "bin_mean_only"):
        assert abs(value - others[name]) > 5e-3, name


def t_rejections(given, table, deviation):
    """Return the percentage of predictions rejected by a t-test of the labels in their bin."""
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
def test_t_test_equals_the_textbook_formula_and_differs_from_the_published_code(recorded, expected, model, bins):
    """The published code divides by the variance of the labels instead of their standard deviation."""
    given, answers = dogs(recorded, expected, model)
    given |= {"bins": bins, "n_bins": 10}
    table = F.tce_table(**given, test="t")
    value = t_rejections(given, table, lambda n, mean: np.sqrt(mean * (1 - mean) * n / (n - 1)))
    assert F.tce(**given, test="t").item() == pytest.approx(value, abs=1e-9)
    assert table.rejected.sum().item() / 500 == pytest.approx(value, abs=1e-9)
    published = answers["tce_WRONG_tests" if bins == "pava_bc" else "tceq_WRONG_tests"]["value"]["ttest_repo"]
    assert t_rejections(given, table, lambda n, mean: mean * (1 - mean)) == pytest.approx(published, abs=5e-4)


# [TCE] Table 2: six simulated cases, 6,000 predictions each


@pytest.mark.parametrize("case", GDA)
def test_values_for_gaussian_discriminants_equal_recordings(recorded, expected, case):
    given, answers = gda(recorded, expected, case)
    check_values(given, answers, n_min=300, n_max=1200)
    check_table(F.tce_table(**given), answers["bins"]["value"])
    literal = answers["tce_alg3_literal"]
    check_table(F.tce_table(**given, variant="paper"), literal["value"])
    merged = F.tce(**given, variant="paper").item()
    assert merged == pytest.approx(literal["value"]["tce"], abs=literal["tolerance"])


def test_published_value_distinguishes_the_two_variants(recorded, expected):
    """For 1 % positives and predictions of 0 %, [TCE] Table 2 prints 95.5. Merging equal means would give 100."""
    given, _ = gda(recorded, expected, "01-00")
    assert F.tce(**given).item() == pytest.approx(95.5, abs=1e-9)
    assert F.tce(**given, variant="paper").item() == pytest.approx(100, abs=1e-9)


def test_every_recorded_tce_entry_is_compared(expected):
    """The entry `ties` describes the file and has no value to compare."""
    shared = {"tce", "tceq", "ece", "mce", "ace", "mceq", "bins"}
    of_dogs = {*shared, "tceq_rej", "bins_alg3", "tce_WRONG_tests", "tceq_WRONG_tests", "ties"}
    names = Counter(entry["case"] for entry in expected if (entry["file"] or "").startswith("imagenet_dogs"))
    assert names == dict.fromkeys(of_dogs, 2)
    names = Counter(e["case"].rpartition("/")[2] for e in expected if e["file"] == "sim_gda.npz")
    assert names == dict.fromkeys({*shared, "tce_alg3_literal"}, 6)
