"""Sharpness-aware minimization."""
