"""The functions behind the commands, imported when a command runs."""
