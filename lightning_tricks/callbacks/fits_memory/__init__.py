"""Batches larger than memory."""
