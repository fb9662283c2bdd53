"""Fusion in eager mode: the user says which modules belong together."""

from horizon_plugin_pytorch.workflow.fuse_modules import fuse_conv_shared_modules, fuse_known_modules, fuse_modules

__all__ = ["fuse_conv_shared_modules", "fuse_known_modules", "fuse_modules"]
