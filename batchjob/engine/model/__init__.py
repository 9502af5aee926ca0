"""A model of Transformers, loaded, checked against its original, and with attention and layers replaced."""
