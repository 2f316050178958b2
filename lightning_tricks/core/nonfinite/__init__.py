"""Losses and gradients that are not finite, and the steps that they spoil."""
