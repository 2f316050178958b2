"""The commands of ``lightning-tricks``, one a file: ``add`` describes it, ``run`` does it."""
