"""Where a quantized model loses accuracy: bad cases, layers, sensitive operators; `QuantAnalysis` asks for them."""
