"""What is probably wrong with a quantized model, why, and what to try."""
