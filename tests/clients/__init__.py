"""Tricks in the modules of other projects: `make test-clients` runs these, each project in an environment of its own."""
