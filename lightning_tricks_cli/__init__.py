"""The parsers of the ``lightning-tricks`` command: apart from ``lightning_tricks``, whose import takes seconds."""
