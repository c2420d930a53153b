"""Options of the training penalties of class vectors, which `functional.kernel` defines."""

from typing import NamedTuple

from torchcalib.ops.pairwise import Kernel


class Density(NamedTuple):
    """Distance |x|^p of the canonical calibration error, and the bandwidth of its Dirichlet densities."""

    p: int
    bandwidth: float

    def width(self, n_classes: int) -> int:
        """Return the number of classes whose sums a program stores."""
        return _width(n_classes, 256)


class Similarity(NamedTuple):
    """Kernel of `ops.pairwise` between probabilities times a scale."""

    name: Kernel
    scale: float

    def width(self, n_classes: int) -> int:
        """Return the number of classes whose sums a program stores."""
        return _width(n_classes, 32)


def _width(n_classes: int, most: int) -> int:
    """Return a power of 2 from 16, the smallest size of a matrix product, to `most`."""
    return min(most, max(16, 1 << (n_classes - 1).bit_length()))
