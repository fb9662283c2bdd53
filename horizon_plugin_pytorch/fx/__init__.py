"""How a model's graph is seen."""
