"""Training steps run again, and everything restored afterwards."""
