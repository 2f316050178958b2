"""Targets with several branches, which make every loss the mixed one."""
