"""The formats of input files: how each is recognised, scanned and read."""
