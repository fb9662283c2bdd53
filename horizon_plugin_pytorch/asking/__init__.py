"""Who asks: everything that the package reads from Python's frames and bytecode.

A prepared model answers its own forward as the float model did (``x.dtype`` is ``torch.float32``, ``self.conv`` is an
`nn.Conv2d`), and everybody else as things are. So whoever answers has to know whose code asks: the model's, a tool's,
torch's or this package's. Call sites and lines in messages are read from the same frames.

Nothing here needs torch, so that a bare interpreter can test it.
"""

from __future__ import annotations

from horizon_plugin_pytorch.asking.who import as_tool

__all__ = ["as_tool"]  # for users; all else is for this package
