"""Products and norms whose result for a token does not depend on what else is in the batch."""
