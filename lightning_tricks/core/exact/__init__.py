"""A fit that goes on exactly: how its loaders are read, and what a checkpoint holds of it."""
