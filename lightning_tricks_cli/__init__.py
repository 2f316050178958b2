"""The ``lightning-tricks`` command. Its parsers do not import ``lightning_tricks``, which takes seconds."""
