"""Tables of the source papers and of other packages: all comparable numbers agree, and none is skipped silently."""

from functools import partial

import numpy as np
import pytest

from benchmarks import other_packages as others
from benchmarks import tables
from benchmarks.job import version_of

COMPARED = {  # numbers compared with printed values, compared with recorded values, and allowed to differ
    "ecd-1": (2, 99, 2),
    "tce-1": (0, 0, 0),  # only the order is compared, below
    "tce-2": (24, 0, 0),
    "tce-5": (10, 2, 0),
    "epsr-1": (84, 0, 0),
    "epsr-curves": (0, 8, 0),
    "epsr-scores": (0, 172, 0),
    "epsr-systems": (98, 0, 0),
}


# Other tests compare the recorded values of these tables (tests/contract), and the order in tce-1 (below).
LONG = {"epsr-systems", "epsr-scores", "epsr-1", "tce-1"}
NAMES = [pytest.param(name, marks=pytest.mark.extended) if name in LONG else name for name in COMPARED]


@pytest.mark.parametrize("name", NAMES)
def test_published_table_is_reproduced(name, request):
    if name in tables.NEEDS_DATA:
        request.getfixturevalue("expected")  # reports a skip if the recordings are missing
    printed, recorded, excused = COMPARED[name]
    cells = list(tables.TABLES[name]())
    compared = [cell for cell in cells if cell.agrees is not None]
    assert [(cell.row, cell.column, cell.value) for cell in compared if cell.wrong] == []
    assert sum(not cell.recorded for cell in compared) == printed
    assert sum(cell.recorded for cell in compared) == (recorded if tables.recorded_answers() else 0)
    assert sum(cell.agrees is False for cell in compared) == excused
    assert all(cell.note for cell in cells if cell.value is None)


def test_errors_of_bins_have_the_order_of_table_1():
    """[TCE] Table 1, for other data: PAVA has the smallest total error, and the largest mean error within bins."""
    errors = [cell.value for cell in tables.tce_1()]
    printed = [float(number) for _, *numbers in tables.TCE_1.values() for number in numbers]
    for column in (slice(0, None, 2), slice(1, None, 2)):
        assert np.argsort(errors[column]).tolist() == np.argsort(printed[column]).tolist()


def test_every_table_is_compared_and_differences_are_reported(monkeypatch, capsys):
    assert set(COMPARED) == set(tables.TABLES)
    of = partial(tables.Cell, "row", "column")
    for cell in (of(0.1249, "0.125"), of(0.1244, "0.125", tolerance=2e-4), of(-float("inf"), "-inf")):
        assert cell.agrees
    assert not of(0.1244, "0.125", note="why").wrong
    assert of(None, "0.125").agrees is None
    for cell in (of(0.1244, "0.125"), of(1.0, "-inf")):
        assert cell.wrong

    def table():
        """A table."""
        yield cell

    monkeypatch.setattr(tables, "TABLES", {"one": table})
    monkeypatch.setattr("sys.argv", ["tables"])
    assert tables.main() == 1
    assert "DIFFERS" in capsys.readouterr().out


# Recorded values of other packages belong to the current predictions, and installed packages still return them.

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
