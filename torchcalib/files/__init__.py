"""Files (and shards) -> tensors: `open_predictions` finds the arrays in files, `PredictionFiles.chunks` streams them.

Nothing is ever unpickled, and nothing is guessed from values. `write_whole` is the other way, bytes -> a file;
`load_saved` reads what torchcalib itself has saved, and trusts it no more than any other file.
"""

from torchcalib.files.finding import expanded, share_of
from torchcalib.files.opening import NoSamplesError, PredictionFiles, existing, open_predictions
from torchcalib.files.reader import InputError, printable
from torchcalib.files.saved import load_saved, saved_tensor, saved_value
from torchcalib.files.source import Source
from torchcalib.files.tensors import load_tensors
from torchcalib.files.writing import write_whole

__all__ = [
    "InputError",
    "NoSamplesError",
    "PredictionFiles",
    "Source",
    "existing",
    "expanded",
    "load_saved",
    "load_tensors",
    "open_predictions",
    "printable",
    "saved_tensor",
    "saved_value",
    "share_of",
    "write_whole",
]
