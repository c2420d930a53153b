"""Read prediction files into tensors (`open_predictions`), and write and load torchcalib's own files (`saved`).

No file is unpickled, and memory is bounded. Logits are recognised by name, never by values.
"""
