"""A pretrained EfficientNet-Lite0: calibrate on twenty photographs, convert, export, run in ONNX Runtime."""
