"""Functions on images and boxes that need no module: colour spaces and non-maximum suppression.

They compute in real numbers, before or after the quantized part of a model; a symbolic trace records each as one call.
"""
