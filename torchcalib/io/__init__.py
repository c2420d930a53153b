"""Files (and shards) -> tensors: `open_predictions` finds the arrays in files, `PredictionFiles.chunks` streams them.

Nothing is ever unpickled, and nothing is guessed from values. `write_whole` is the other way, bytes -> a file;
`load_saved` reads what torchcalib itself has saved, and trusts it no more than any other file.
"""
