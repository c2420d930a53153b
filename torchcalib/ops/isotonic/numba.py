"""The loops of `isotonic_reference`, compiled by numba. Imported by `dispatch` alone, at first use."""

import numba

from torchcalib.ops.isotonic import reference

# Compiled once for each type of column and kept on disk, so that a fresh process does not compile again.
pava = numba.njit(cache=True, nogil=True)(reference.pava)
pava_bc = numba.njit(cache=True, nogil=True)(reference.pava_bc)
