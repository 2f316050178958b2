"""How much memory training takes."""
