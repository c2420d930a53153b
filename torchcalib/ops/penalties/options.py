"""Options of training penalties, and the batches for which their kernels are the fastest algorithm."""

from typing import Literal, NamedTuple

from torchcalib.ops.pairwise import Kernel

_MAX_BINS = 128  # largest number of soft bins whose sums fit into the registers of a program
_MAX_PAIRED = 4096  # largest number of events for which a sum over all pairs is faster than sorting
_MAX_ENTRIES = 2**30  # largest number of differences for which tiles of pairs are faster than matrix products


class SoftBinning(NamedTuple):
    """Norm of gaps over B bins with membership softmax_b(-(p - centre_b)^2 / temperature) of events."""

    n_bins: int
    temperature: float
    norm: Literal["l1", "l2"]

    def has_kernel(self, n: int, n_classes: int) -> bool:  # noqa: ARG002
        """Return whether the kernels take the batch."""
        return self.n_bins <= _MAX_BINS


class Embedding(NamedTuple):
    """Root of sum_ij d_i d_j exp(-|p_i - p_j| / bandwidth) for residuals d of events; see `losses.mmce`."""

    bandwidth: float
    weighted: bool

    def has_kernel(self, n: int, n_classes: int) -> bool:  # noqa: ARG002
        """Return whether the kernels take the batch."""
        return n <= _MAX_PAIRED


class Canonical(NamedTuple):
    """Canonical calibration error with exponent p; see `functional.canonical_error`."""

    p: int
    bandwidth: float

    def has_kernel(self, n: int, n_classes: int) -> bool:
        """Return whether the kernels take the batch."""
        return _n_entries(n, n_classes, self.width(n_classes)) <= _MAX_ENTRIES

    def width(self, n_classes: int) -> int:
        """Return the number of classes whose sums a program stores."""
        return _width(n_classes, 256)


class Squared(NamedTuple):
    """Biased squared kernel calibration error, with a kernel of probabilities times `scale`; see `functional.skce`."""

    kernel: Kernel
    scale: float

    def has_kernel(self, n: int, n_classes: int) -> bool:
        """Return whether the kernels take the batch."""
        return _n_entries(n, n_classes, self.width(n_classes)) <= _MAX_ENTRIES

    def width(self, n_classes: int) -> int:
        """Return the number of classes whose sums a program stores."""
        return _width(n_classes, 32)


Options = SoftBinning | Embedding | Canonical | Squared


def _width(n_classes: int, most: int) -> int:
    """Return a power of 2 from 16 to `most`."""
    return min(most, max(16, 1 << (n_classes - 1).bit_length()))


def _n_entries(n: int, n_classes: int, width: int) -> int:
    """Return the number of differences of class vectors: those of all pairs, for each range of classes."""
    return n * n * n_classes * -(-n_classes // width)
