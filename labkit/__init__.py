"""labkit."""
