"""Tests of the values of several arguments."""

from itertools import product

import pytest


def each_value(**axes):
    """Parametrise a test by the product of values of several arguments.

    The normal run has two diagonals of the product, in which every value occurs; the extended run has the others.

    Args:
        axes: dict of names and values of each argument, or a list of values.
    """
    lists = [list(axis.items() if isinstance(axis, dict) else ((str(x), x) for x in axis)) for axis in axes.values()]
    n = max(map(len, lists))
    diagonals = {tuple((k + j * (k // n)) % len(axis) for j, axis in enumerate(lists)) for k in range(2 * n)}
    rows = []
    for places in product(*(range(len(axis)) for axis in lists)):
        names, values = zip(*(axis[k] for axis, k in zip(lists, places, strict=True)), strict=True)
        marks = [pytest.mark.extended] * (places not in diagonals)
        rows.append(pytest.param(*values, id="-".join(names), marks=marks))
    return pytest.mark.parametrize(list(axes), rows)
