"""The commands of ``lightning-tricks``, one per file: ``add`` adds its parser, ``run`` runs it."""
