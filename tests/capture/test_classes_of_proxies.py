"""Who asks for the class of a traced value: the user's code gets that of a tensor, functions written in C the true one.

For torch's C code a class is a promise about memory: taking a proxy for a tensor, it would read what is not there.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from horizon_plugin_pytorch.capture.tracing import trace

FOUND: dict[str, Any] = {}


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        FOUND["isinstance"] = isinstance(x, Tensor)
        FOUND["in a comprehension"] = [isinstance(v, Tensor) for v in (x, 1.0)]
        FOUND["over lines"] = isinstance(
            x,
            (list, Tensor),
        )
        FOUND["attribute"] = x.__class__ is Tensor
        match x:
            case Tensor():
                FOUND["match"] = True
        FOUND["from C"] = functools.partial(isinstance, x, Tensor)()
        FOUND["mapped from C"] = list(map(isinstance, [x], [Tensor]))
        return x


def test_python_code_is_told_of_tensors_and_c_code_is_not() -> None:
    FOUND.clear()
    for _ in range(20):  # until the interpreter has specialised the calls
        trace(Asks())
    assert FOUND == {
        "isinstance": True, "in a comprehension": [True, False], "over lines": True, "attribute": True, "match": True,
        "from C": False, "mapped from C": [False],
    }  # fmt: skip
