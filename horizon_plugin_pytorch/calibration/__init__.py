"""Data through a model: calibrate, and the methods that improve on it."""
