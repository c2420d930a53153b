"""Loops of `isotonic.formula`, compiled by numba. Only `dispatch` imports this module, because numba is optional."""

import numba
from numba.extending import register_jitable

from torchcalib.ops.isotonic import formula

for _loop in (formula.pava, formula.pava_bc, formula.augmented):  # called by the loops over rows
    register_jitable(_loop)
starts_of_rows = numba.njit(cache=True, nogil=True, error_model="numpy")(formula.starts_of_rows)
augmented_of_rows = numba.njit(cache=True, nogil=True, error_model="numpy")(formula.augmented_of_rows)
