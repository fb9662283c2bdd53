"""Stages of a deployed model that should give the same numbers."""

from horizon_plugin_pytorch.export.consistency import ConsistencyAnalyzer

__all__ = ["ConsistencyAnalyzer"]
