"""Compare float64 results."""

import torch


def close(found, expected, **tolerance):
    """Compare up to the order of float64 sums over about 100 rows: 100 * 2.2e-16, times values of order 10."""
    torch.testing.assert_close(found, expected, **{"rtol": 1e-12, "atol": 1e-12, **tolerance}, equal_nan=True)
