"""The weights that a process holds, under any engine."""
