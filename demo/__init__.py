"""Two complete journeys from a float model to integers; `make demo` and `make demo-imagenet` run them."""
