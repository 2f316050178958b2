"""Tricks in the modules of other projects, each in an environment of its own: `make test-clients` runs these."""
