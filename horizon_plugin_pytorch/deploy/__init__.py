"""From a converted model to a graph that runs elsewhere."""
