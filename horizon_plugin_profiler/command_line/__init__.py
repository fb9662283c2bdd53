"""The tools for people without a script: ``python -m horizon_plugin_profiler``."""
