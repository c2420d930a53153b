"""Results as data: reports, comparisons and training histories, and the lines of which they consist.

Each class has its values, its tables and its exports. `torchcalib.reporting` computes and renders results, and
`torchcalib.plots` draws them.
"""

from torchcalib._lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
