"""What a person sees of a run: console lines, the progress bar, the result."""
