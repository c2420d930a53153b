"""The grids that residuals are smoothed on, and the cells between their nodes.

The published procedure rounds every sample linearly to the nodes of a grid, whose step follows from the width that is
tried. Its widths are multiples of 1/1024: from 0.01 on they share a grid of 1,000 steps, and each below has its own.
Rounding is linear between nodes, so it needs no more than four sums over each cell that the nodes of all grids
together leave: of weight and residual, each also times the confidence. They are taken once, and add.
"""

LEVELS = 1024  # widths are multiples of 1 / LEVELS: ten halvings of [0, 1]
FINEST = 2  # widths in 1024ths: the published search stops above 0.001
COARSE_STEPS = 1000
COARSEST_OWN = 10  # widths up to this many 1024ths have grids of their own


def steps_of(width: float) -> int:
    """Return how many steps the grid of a width has."""
    return max(2 * COARSE_STEPS, round(20 / width)) // 2


# Every grid, but for those whose nodes are among another's: that of 8 / 1024 has every fourth node of that of 2 / 1024.
_OWN = [steps_of(level / LEVELS) for level in range(FINEST, COARSEST_OWN + 1)]
GRIDS = [COARSE_STEPS, *(m for m in _OWN if not any(other > m and other % m == 0 for other in _OWN))]
N_CELLS = sum(GRIDS)
FINEST_STEPS = max(GRIDS)
