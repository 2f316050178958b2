"""The ``lightning-tricks`` command."""
