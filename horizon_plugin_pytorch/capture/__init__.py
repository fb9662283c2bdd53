"""The graph of a model, by running it or by symbolic trace, and what can be read from it."""
