"""Operators one after the other: every optimisation of ONNX Runtime must leave the integers alone."""
