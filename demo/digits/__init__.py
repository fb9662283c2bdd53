"""Handwritten digits: train, calibrate, train on the integer grid, convert, export, run in ONNX Runtime."""
