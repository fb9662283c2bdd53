"""A prepared model while it runs: hooks, call sites, and where functions on quantized tensors are sent."""
