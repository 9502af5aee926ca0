"""The output for a person: console lines, the progress bar, the result."""
