"""Estimating the memory that training takes."""
