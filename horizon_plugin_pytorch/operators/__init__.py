"""The table of operators: what connects float, QAT and quantized forms, and what each chip has."""
