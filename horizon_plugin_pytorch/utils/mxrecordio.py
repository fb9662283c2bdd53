"""The vendor's readers of MXNet's record files; not part of this project."""

raise ImportError(
    "horizon_plugin_pytorch.utils.mxrecordio had MXRecordIO and MXIndexedRecordIO, readers of MXNet's record files "
    "(.rec) for data sets; this project has none. MXNet's own are in `mxnet.recordio`, with the same names and "
    "arguments."
)
