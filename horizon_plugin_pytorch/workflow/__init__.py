"""The verbs: prepare, convert, fuse, and loading of checkpoints."""
