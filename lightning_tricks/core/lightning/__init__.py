"""Facts about a Trainer and its engine, step counting, patched methods."""
