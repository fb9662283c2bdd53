"""Helpers whose paths the guides give."""
