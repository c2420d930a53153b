"""The axis of probabilities, plain and in log-odds: where it ends, and how edges are written."""

import numpy as np
import pytest

from torchcalib.plots.probability_axis import ProbabilityAxis, short


def test_edges_are_written_by_their_distance_from_0_or_1():
    written = {1.0: "1", 0.25: "0.25", 0.99039: "0.9904", 2.437e-6: "2.4e−6", 1e-19: "1e−19", 1 - 1.3e-4: "1−1.3e−4"}
    assert {probability: short(probability) for probability in written} == written


@pytest.mark.parametrize("n", [0.5, 1, 60, 50_000, 3e9])
def test_a_logit_axis_ends_where_samples_cannot_tell_probabilities_from_0_and_1(n):
    axis = ProbabilityAxis.logit_of(np.array([0.0, 1e-19, 0.3, 1.0]), n)
    finest = min(0.1 / n, 0.01)
    assert finest / 2 < axis.low < finest
    assert finest / 2 < 1 - axis.high < finest
    inside = np.array([0.02, 0.5, 0.98])
    np.testing.assert_allclose(axis.value(axis.place(inside)), inside, rtol=1e-12)
    np.testing.assert_array_equal(axis.place(np.array([0.0, 1.0])), axis.place(np.array([axis.low, axis.high])))


def test_a_logit_axis_is_no_longer_than_what_it_shows():
    axis = ProbabilityAxis.logit_of(np.array([0.2, 0.4]), 1e6)
    np.testing.assert_allclose(axis.place(np.array([0.2, 0.4])) - axis.place(np.array(axis[:2])), [0.4, -0.4])
