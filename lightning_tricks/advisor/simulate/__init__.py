"""Simulating a training step of a transformer on more devices than there are here: arithmetic only."""
