"""Ranges of tensors: sketches, observers, what processes share, what is kept between batches."""
