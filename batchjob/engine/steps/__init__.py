"""One step on a device: inputs, attention metadata, the forward, CUDA graphs."""
