"""Graphs that leave the package."""
