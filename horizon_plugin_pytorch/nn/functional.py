"""Functions of `horizon_plugin_pytorch.nn` that torch does not have: detection, point clouds, colour."""
