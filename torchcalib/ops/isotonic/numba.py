"""Loops of `isotonic.reference`, compiled by numba. Only `dispatch` imports this module, because numba is optional."""

import numba

from torchcalib.ops.isotonic import reference

pava = numba.njit(cache=True, nogil=True)(reference.pava)
pava_bc = numba.njit(cache=True, nogil=True)(reference.pava_bc)
augmented = numba.njit(cache=True, nogil=True)(reference.augmented)
