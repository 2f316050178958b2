"""Low-rank adapters beside frozen weights, and linear layers in few bits: networks, checkpoints and merged weights."""
