"""Averages of weights: kept, exchanged with the weights, saved and restored."""
