"""Cost matrices: worked examples, values that compare and pickle, and wrong costs."""

import copy
import math
import pickle

import numpy as np
import torch
from helpers.refusals import assert_refused

import torchcalib as tc


def test_cost_matrix_helpers():
    assert tc.CostMatrix.zero_one(3).costs == ((0, 1, 1), (1, 0, 1), (1, 1, 0))
    assert tc.CostMatrix.zero_one(2).with_reject(0.1).costs == ((0, 1, 0.1), (1, 0, 0.1))
    assert tc.CostMatrix.zero_one(2).with_reject([0.1, 0.5]).costs == ((0, 1, 0.1), (1, 0, 0.5))
    assert tc.CostMatrix.imbalanced(3).costs == ((0, 1, 1), (1, 0, 1), (10, 10, 0))
    assert tc.CostMatrix.imbalanced(2, factor=3, important=0).costs == ((0, 3), (1, 0))
    assert tc.CostMatrix.from_utilities([[5, 2, 3], [-1, 0, -4]]).costs == ((0, 3, 2), (1, 0, 4))
    for cost in (np.float32(0.25), torch.tensor(0.25), torch.tensor([0.25, 0.25]), np.array([0.25, 0.25])):
        assert tc.CostMatrix.zero_one(2).with_reject(cost).costs == ((0, 1, 0.25), (1, 0, 0.25))
    assert (tc.CostMatrix.zero_one(2).with_reject(0.1).num_decisions, tc.CostMatrix.zero_one(4).num_classes) == (3, 4)


def test_cost_matrix_is_a_value():
    rows = [[0.0, 1.0, 0.25], [4.0, 0.0, 0.25]]
    matrix = tc.CostMatrix(rows)
    read = (tc.CostMatrix(given) for given in (torch.tensor(rows), np.array(rows), tuple(rows)))
    for same in (pickle.loads(pickle.dumps(matrix)), copy.deepcopy(matrix), *read):
        assert same == matrix
        assert hash(same) == hash(matrix)
    assert matrix != tc.CostMatrix.zero_one(2)
    assert repr(matrix) == f"CostMatrix({rows})"
    one, other = tc.CostMatrix.zero_one(50), tc.CostMatrix.imbalanced(50)
    assert len(repr(one)) < 40
    assert repr(one) != repr(other)


def risk(cost):
    return tc.bayes_risk(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]), task="binary", cost=cost)


CALLS = [
    ("one class", lambda: risk(cost=[[0, 1]]), ValueError, "`cost`", "at least 2 rows", "[2]"),
    ("transposed", lambda: risk(cost=[[0, 1], [1, 0], [2, 2]]), ValueError, "`cost`", "transpose"),
    ("ragged", lambda: risk(cost=[[0, 1], [1]]), ValueError, "`cost`", "one length", "[2, 1]"),
    ("no decision", lambda: risk(cost=[[], []]), ValueError, "`cost`", "[0, 0]"),
    ("a vector", lambda: risk(cost=[0, 1]), TypeError, "`cost`", "matrix of numbers"),
    ("bools", lambda: risk(cost=[[False, True], [True, False]]), TypeError, "`cost`", "numbers"),
    ("infinite cost", lambda: risk(cost=[[0, math.inf], [1, 0]]), ValueError, "`cost`", "inf", "above all others"),
    ("NaN utility", lambda: tc.CostMatrix.from_utilities([[0, math.nan], [1, 0]]), ValueError, "`utilities`"),
    ("no classes", lambda: tc.CostMatrix.zero_one(1), ValueError, "`num_classes`", "at least 2"),
    ("important class 5 of 3", lambda: tc.CostMatrix.imbalanced(3, important=5), ValueError, "`important`", "got 5"),
    ("too few rejects", lambda: tc.CostMatrix.zero_one(3).with_reject([0.1]), ValueError, "`cost`", "3 classes"),
    ("reject of True", lambda: tc.CostMatrix.zero_one(2).with_reject(True), TypeError, "`cost`", "True"),
    ("cost of 400 digits", lambda: risk(cost=[[0, 10**400], [1, 0]]), ValueError, "`cost`", "finite", "inf"),
    ("cost of 300 digits", lambda: risk(cost=[[0, 10**300], [1, 0]]), ValueError, "`cost`", "at most 1e+150"),
    ("factor of text", lambda: tc.CostMatrix.imbalanced(2, factor="3"), TypeError, "`factor`", "'3'"),
    ("negative factor", lambda: tc.CostMatrix.imbalanced(2, factor=-3), ValueError, "`factor`", "-3"),
]  # fmt: skip


def test_wrong_costs_are_refused():
    assert_refused((what, call, error, parts) for what, call, error, *parts in CALLS)
