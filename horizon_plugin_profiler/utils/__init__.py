"""Helpers of the profiler, under the paths that public code imports."""
