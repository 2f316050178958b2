"""Low-rank adapters: injected into a network, left apart in checkpoints, and merged into its weights."""
