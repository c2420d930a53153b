"""Recorded values of other packages belong to the current predictions, and installed packages still return them."""

import pytest

from benchmarks import other_packages as others
from benchmarks.job import version_of

RECORDED = others.recorded()
INSTALLED = [name for name, entry in RECORDED.items() if version_of(name) == entry["version"]]


def test_every_package_has_a_version_a_date_and_all_its_values():
    assert set(RECORDED) == set(others.PACKAGES) - {"torchcalib"}
    for package, entry in RECORDED.items():
        assert entry["version"]
        assert entry["date"]
        metrics = others.PACKAGES[package][1]
        found = {(metric, case) for metric, values in entry["values"].items() for case in values}
        required = {key for key in others.CASES if key[0] in metrics}
        if package in others.WITHOUT_IGNORE_INDEX:
            required.remove(("ECE", "three classes, ignored rows"))
        assert found == required


@pytest.mark.parametrize("package", INSTALLED)
def test_recorded_values_are_those_of_the_installed_version(package):
    for metric, values in others.values_of(package).items():
        for case, value in values.items():
            expected = RECORDED[package]["values"][metric][case]
            wanted = expected if isinstance(expected, str) else pytest.approx(expected, rel=1e-4)
            assert value == wanted, (metric, case)
