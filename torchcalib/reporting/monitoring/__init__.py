"""What happens to calibration while a model trains: `Monitor` takes validation batches, epoch by epoch.

It keeps a `History`, which is data only, and says in words when over-confidence grows. No training framework is known
here; `torchcalib.integrations` are the ways into theirs.
"""
