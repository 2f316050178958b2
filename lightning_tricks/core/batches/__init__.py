"""Training batches changed between the loader and the training step."""
