"""Files on processors without VNNI, whose kernels add two products of bytes in 16 bits, and saturate.

This processor has it, perhaps: a process is told that it has not, and ONNX Runtime takes its older kernels there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.quantization import convert_fx
from tests.export.test_layers_in_files import Between, Chain, Deep, Wide, exported, kinds, widen_
from tests.routes import as_numbers, prepared

_RUN = """
import sys
import numpy as np, onnxruntime as ort
given = np.load(sys.argv[2])
options = ort.SessionOptions()
options.intra_op_num_threads = 1
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
np.savez(sys.argv[3], *(session.run(None, {"x": x})[0] for x in given.values()))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that hides what newer processors have; tests are left out where there is no such thing."""
    target = tmp_path_factory.mktemp("shim") / "older_processor.so"
    compiler = shutil.which("cc")
    if not sys.platform.startswith("linux") or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    source = Path(__file__).with_name("older_processor.c")
    built = subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", target, source], capture_output=True)
    if built.returncode or _in_older_process(target, ["-c", ""]).returncode == 97:
        pytest.skip("this processor does not let programs be told about another one")
    return target


def _in_older_process(shim: Path, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True)


def results(shim: Path, folder: Path, file: onnx.ModelProto, batches: list[Tensor]) -> list[np.ndarray]:
    """What a file gives on an older processor."""
    paths = [str(folder / name) for name in ("model.onnx", "given.npz", "found.npz")]
    onnx.save(file, paths[0])
    np.savez(paths[1], *(x.numpy() for x in batches))
    process = _in_older_process(shim, ["-c", _RUN, *paths])
    assert process.returncode == 0, process.stderr.decode()
    return list(np.load(paths[2]).values())


def product(weight: np.ndarray, zero: int) -> onnx.ModelProto:
    """Bytes times weights, as a file."""
    make, shape = onnx.helper, [4, weight.shape[0]]
    constants = {"w": weight, "zx": np.uint8(0), "zw": weight.dtype.type(zero)}
    graph = make.make_graph(
        [make.make_node("MatMulInteger", ["x", "w", "zx", "zw"], ["y"])], "product",
        [make.make_tensor_value_info("x", onnx.TensorProto.UINT8, shape)],
        [make.make_tensor_value_info("y", onnx.TensorProto.INT32, [4, weight.shape[1]])],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )  # fmt: skip
    return make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8)


@pytest.mark.processes
@pytest.mark.slow
def test_the_older_kernels_saturate_unless_weights_are_unsigned(shim: Path, tmp_path: Path) -> None:
    """Without this the tests below would show nothing: 255 * (127 + 127) does not fit in 16 bits."""
    x = torch.full((4, 64), 255, dtype=torch.uint8)
    sums = 64 * 255 * 127
    (signed,) = results(shim, tmp_path, product(np.full((64, 32), 127, np.int8), 0), [x])
    (unsigned,) = results(shim, tmp_path, product(np.full((64, 32), 255, np.uint8), 128), [x])
    assert int(signed.max()) < sums and bool((unsigned == sums).all())


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["random", "at their ends"])
@pytest.mark.parametrize(
    ("net", "dtype"), [(Chain, "qint8"), (Deep, "qint16"), (Wide, "qint16")], ids=["bytes", "digits", "float"]
)
def test_files_give_the_same_integers(
    shim: Path, tmp_path: Path, net: type[nn.Module], dtype: str, weights: str
) -> None:
    """Signed, unsigned and halved weights; groups and few channels; bytes of 16-bit integers."""
    generator = torch.Generator().manual_seed(1)
    x = (
        torch.randn(1, 3, 24, 24, generator=generator)
        if net is Chain
        else torch.randn(1, 3, 12, 12, generator=generator)
    )
    torch.manual_seed(2)
    model = Between(net()).eval()
    model = convert_fx(prepared(widen_(model) if weights != "random" else model, (x,), dtype))
    file = exported(model, x)
    assert {Chain: "QLinearConv", Deep: "MatMulInteger", Wide: "Conv"}[net] in kinds(file)
    ends = torch.where(torch.rand(x.shape, generator=generator) < 0.5, -1e9, 1e9)
    batches = [x, 3 * x, ends, torch.full_like(x, 1e9), torch.full_like(x, -1e9)]
    with torch.no_grad():
        wanted = [as_numbers(model(batch))[0] for batch in batches]
    for number, (given, numbers) in enumerate(zip(results(shim, tmp_path, file, batches), wanted, strict=True)):
        assert torch.equal(torch.from_numpy(given), numbers), number
