"""Passes: each a function from graph module to graph module."""
