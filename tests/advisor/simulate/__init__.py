"""Tests of the simulated step."""
