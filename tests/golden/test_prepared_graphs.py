"""The text of prepared graphs: a change of capture, replacement, fusion or names shows here, and is then meant.

After a change that is meant, write the files anew with ``python -m tests.golden.test_prepared_graphs``, and read the
diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import fx

from horizon_plugin_pytorch.march import March, set_march
from horizon_plugin_pytorch.quantization import default_qat_8bit_fake_quant_qconfig, prepare_qat_fx
from horizon_plugin_pytorch.runtime.node_notes import notes
from tests.models import ZOO, make

FOLDER = Path(__file__).parent / "graphs"


def describe(name: str) -> str:
    """Nodes of the prepared graph, the class of every module that they call, and the state dict's keys."""
    qat = prepare_qat_fx(make(name)[0], {"": default_qat_8bit_fake_quant_qconfig})
    lines = ["graph"]
    numbers = {node: _Number(i) for i, node in enumerate(qat.graph.nodes)}
    for node, number in numbers.items():
        made_by = f"    # {notes(node).made_by}" if notes(node).made_by else ""
        args, kwargs = (fx.node.map_arg(a, numbers.__getitem__) for a in (node.args, dict(node.kwargs)))
        lines.append(
            f"  {number!r} = {node.op} {_target(node.target)} {tuple(args)} {dict(kwargs) or ''}".rstrip() + made_by
        )
    lines.append("modules")
    lines += [f"  {path}: {type(m).__module__}.{type(m).__name__}" for path, m in qat.named_modules() if path]
    lines.append("state")
    lines += [f"  {key} {tuple(value.shape)}" for key, value in qat.state_dict().items()]
    return "\n".join(lines) + "\n"


class _Number(int):
    """A node by its place: torch's names for nodes change from version to version."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _target(target: object) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


@pytest.mark.parametrize("name", ZOO)
def test_the_prepared_graph_is_the_one_we_know(name: str) -> None:
    assert describe(name) == (FOLDER / f"{name}.txt").read_text()


if __name__ == "__main__":
    set_march(March.BAYES)
    FOLDER.mkdir(exist_ok=True)
    for zoo_name in ZOO:
        (FOLDER / f"{zoo_name}.txt").write_text(describe(zoo_name))
