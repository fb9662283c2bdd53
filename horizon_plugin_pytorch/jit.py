"""TorchScript files: written with the version of this package, checked when they are read, moved between devices."""

from horizon_plugin_pytorch.export.script_files import load, save, to_device

__all__ = ["load", "save", "to_device"]
