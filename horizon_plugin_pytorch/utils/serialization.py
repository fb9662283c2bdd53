"""TorchScript files that know the version of this package that wrote them."""

from horizon_plugin_pytorch.export.script_files import get_version_from_scriptmodule, save_with_version

__all__ = ["get_version_from_scriptmodule", "save_with_version"]
