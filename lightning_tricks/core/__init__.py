"""What the tricks stand on; nothing here is public."""
