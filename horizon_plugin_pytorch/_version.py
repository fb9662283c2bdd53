"""The package's version: three plain numbers, because user code compares them."""

__version__ = "4.0.0"
