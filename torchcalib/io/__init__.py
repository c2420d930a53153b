"""Files and shards to tensors (`open_predictions`), and files that torchcalib writes (`saved`).

Nothing is unpickled, memory is bounded, and nothing is guessed from values.
"""
