"""Pool adjacent violators loops of `isotonic.reference`, compiled by numba. Only `dispatch` imports this module."""

import numba

from torchcalib.ops.isotonic import reference

# Compiled once per dtype, and cached on disk for later processes.
pava = numba.njit(cache=True, nogil=True)(reference.pava)
pava_bc = numba.njit(cache=True, nogil=True)(reference.pava_bc)
