"""Transforms of samples, on the device."""
