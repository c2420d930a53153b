"""Read prediction files into tensors (`open_predictions`), and write and load torchcalib's own files (`saved`).

No file is unpickled. Rows are read in chunks, which limits the memory. Logits are identified by name, never by value.
"""
