"""The attention backends, one a module, and their choice."""
