"""Checkpoints from anywhere, read without running what they hold."""
