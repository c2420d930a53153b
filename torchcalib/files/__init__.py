"""Files (and shards) -> tensors: `open_predictions` finds the arrays in files, `PredictionFiles.chunks` streams them.

Nothing is ever unpickled, and nothing is guessed from values.
"""

from torchcalib.files.opening import PredictionFiles, open_predictions
from torchcalib.files.reader import InputError

__all__ = ["InputError", "PredictionFiles", "open_predictions"]
