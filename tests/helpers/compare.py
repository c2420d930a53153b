"""Compare float64 results, and gradients with central differences."""

import torch


def close(found, expected, **tolerance):
    """Compare up to the order of float64 sums over about 100 rows: 100 * 2.2e-16, times values of order 10."""
    torch.testing.assert_close(found, expected, **{"rtol": 1e-12, "atol": 1e-12, **tolerance}, equal_nan=True)


def central_difference(function, x, at, step=1e-6):
    """Return the central difference of `function` in the entry `at` of a tensor."""
    values = []
    for sign in (1, -1):
        moved = x.clone()
        moved[at] += sign * step
        values.append(float(function(moved)))
    return (values[0] - values[1]) / (2 * step)
