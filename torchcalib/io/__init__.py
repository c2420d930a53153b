"""Files and shards to tensors (`open_predictions`), and files that torchcalib writes (`saved`).

Nothing is unpickled, memory is bounded, and whether predictions are logits is never guessed from values.
"""
