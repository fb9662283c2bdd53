"""Architectures nobody here designed."""
