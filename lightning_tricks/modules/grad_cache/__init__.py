"""Contrastive batches larger than memory."""
