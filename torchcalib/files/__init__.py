"""Files (and shards) -> tensors: `open_predictions` finds the arrays in files, `PredictionFiles.chunks` streams them.

Nothing is ever unpickled, and nothing is guessed from values. `write_whole` is the other way, bytes -> a file.
"""

from torchcalib.files.opening import PredictionFiles, open_predictions
from torchcalib.files.reader import InputError, printable
from torchcalib.files.tensors import load_tensors
from torchcalib.files.writing import write_whole

__all__ = ["InputError", "PredictionFiles", "load_tensors", "open_predictions", "printable", "write_whole"]
