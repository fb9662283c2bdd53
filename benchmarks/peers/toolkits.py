"""How each toolkit trains, calibrates and deploys a model in int8, as its documentation sets it up.

Each imports its package when it is used: only one of them is installed in an environment.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Forward = Callable[[Tensor], Any]


class Toolkit(Protocol):
    """What the table asks of a toolkit. Models come without stubs, in evaluation mode, and may be changed."""

    requirements: tuple[str, ...]
    deployed_in: str

    def training(self, model: nn.Module, example: Tensor) -> nn.Module:
        """The model as it trains on the integer grid, with its scales set."""
        ...

    def calibration_seconds(self, model: nn.Module, batch: Tensor) -> Iterator[float]:
        """Processor seconds of a batch of calibration, again and again."""
        ...

    def quantized(self, model: nn.Module, batches: Sequence[Tensor]) -> tuple[Forward, Forward]:
        """The simulated and the deployed form after calibration alone."""
        ...


def _timed(job: Callable[[], Any]) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start


def _repeated(calibrating: nn.Module, batch: Tensor) -> Iterator[float]:
    while True:
        yield _timed(lambda: calibrating(batch))


def in_onnx_runtime(file: Path) -> Forward:
    """A file in ONNX Runtime, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


class Ours:
    """This package: min_max scales as `default_calibration_qconfig_setter` has them."""

    requirements: tuple[str, ...] = ()
    deployed_in = "ONNX Runtime"

    def _prepared(self, model: nn.Module, example: Tensor, observer: str = "min_max") -> nn.Module:
        from horizon_plugin_pytorch.march import March, set_march
        from horizon_plugin_pytorch.quantization import (
            FakeQuantState,
            QuantWrapper,
            get_default_qconfig,
            prepare_qat_fx,
            set_fake_quantize,
        )

        set_march(March.NASH_E)
        prepared = prepare_qat_fx(QuantWrapper(model).eval(), {"": get_default_qconfig(activation_observer=observer)})
        set_fake_quantize(prepared, FakeQuantState.CALIBRATION)
        return prepared

    def training(self, model: nn.Module, example: Tensor) -> nn.Module:
        from horizon_plugin_pytorch.quantization import FakeQuantState, set_fake_quantize

        prepared = self._prepared(model, example)
        with torch.no_grad():
            prepared(example)
        set_fake_quantize(prepared, FakeQuantState.QAT)
        return prepared.train()

    def calibration_seconds(self, model: nn.Module, batch: Tensor) -> Iterator[float]:
        return _repeated(self._prepared(model, batch), batch)

    def quantized(self, model: nn.Module, batches: Sequence[Tensor]) -> tuple[Forward, Forward]:
        from horizon_plugin_pytorch.quantization import FakeQuantState, convert_fx, set_fake_quantize

        prepared = self._prepared(model, batches[0], "mse")
        for batch in batches:
            prepared(batch)
        set_fake_quantize(prepared, FakeQuantState.VALIDATION)
        return prepared, self._deployed(convert_fx(prepared), batches[0])

    def _deployed(self, converted: nn.Module, example: Tensor) -> Forward:
        from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            export_quantized_onnx(converted, example, str(file))
            return in_onnx_runtime(file)


class OursInTorch(Ours):
    """This package, deployed in torch: the converted model."""

    deployed_in = "torch"

    def _deployed(self, converted: nn.Module, example: Tensor) -> Forward:
        return converted


class TorchAo:
    """torch.ao's FX graph mode, engine x86."""

    requirements: tuple[str, ...] = ()
    deployed_in = "torch, x86"

    def training(self, model: nn.Module, example: Tensor) -> nn.Module:
        from torch.ao.quantization import get_default_qat_qconfig_mapping
        from torch.ao.quantization.quantize_fx import prepare_qat_fx

        return prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping("x86"), (example,))

    def _calibrating(self, model: nn.Module, example: Tensor) -> nn.Module:
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import prepare_fx

        return prepare_fx(model, get_default_qconfig_mapping("x86"), (example,))

    def calibration_seconds(self, model: nn.Module, batch: Tensor) -> Iterator[float]:
        return _repeated(self._calibrating(model, batch), batch)

    def quantized(self, model: nn.Module, batches: Sequence[Tensor]) -> tuple[Forward, Forward]:
        from torch.ao.quantization.fake_quantize import disable_observer
        from torch.ao.quantization.quantize_fx import convert_fx

        torch.backends.quantized.engine = "x86"
        # The simulated form is the QAT model: fake quantizers with the ranges of these batches, which do not move on.
        simulated = self.training(model, batches[0]).eval()
        for batch in batches:
            simulated(batch)
        simulated.apply(disable_observer)
        return simulated, convert_fx(copy.deepcopy(simulated))


class TorchAoPt2e:
    """torchao's PT2E with the quantizer for x86 CPUs, deployed by torch.compile."""

    requirements = ("torchao==0.18.0",)
    deployed_in = "torch.compile"

    def _quantizer(self, training: bool) -> Any:
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_qat=training))

    def _exported(self, model: nn.Module, example: Tensor) -> nn.Module:
        """The quantizer finds a convolution with its sum and ReLU by what only a strict export writes down."""
        return torch.export.export(model, (example,), strict=True).module()

    def training(self, model: nn.Module, example: Tensor) -> nn.Module:
        from torchao.quantization.pt2e import move_exported_model_to_train
        from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e

        prepared = prepare_qat_pt2e(self._exported(model.train(), example), self._quantizer(True))
        return move_exported_model_to_train(prepared)

    def _calibrating(self, model: nn.Module, example: Tensor) -> nn.Module:
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

        return prepare_pt2e(self._exported(model, example), self._quantizer(False))

    def calibration_seconds(self, model: nn.Module, batch: Tensor) -> Iterator[float]:
        return _repeated(self._calibrating(model, batch), batch)

    def quantized(self, model: nn.Module, batches: Sequence[Tensor]) -> tuple[Forward, Forward]:
        import torch._inductor.config
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

        prepared = self._calibrating(model, batches[0])
        for batch in batches:
            prepared(batch)
        simulated = convert_pt2e(prepared)
        torch._inductor.config.freezing = True
        return simulated, torch.compile(copy.deepcopy(simulated))


class Nncf:
    """NNCF, deployed in OpenVINO."""

    requirements = ("nncf==3.4.0", "openvino==2026.4.1")
    deployed_in = "OpenVINO"

    def _calibrated(self, model: nn.Module, batches: Sequence[Tensor]) -> nn.Module:
        import nncf

        nncf.set_log_level(40)
        return nncf.quantize(model, nncf.Dataset(list(batches)), subset_size=len(batches))

    def training(self, model: nn.Module, example: Tensor) -> nn.Module:
        return self._calibrated(model, [example]).train()

    def calibration_seconds(self, model: nn.Module, batch: Tensor) -> Iterator[float]:
        """What five batches more add to a quantization, which has no call for one."""
        while True:
            one = _timed(lambda: self._calibrated(copy.deepcopy(model), [batch]))
            yield (_timed(lambda: self._calibrated(copy.deepcopy(model), [batch] * 6)) - one) / 5

    def quantized(self, model: nn.Module, batches: Sequence[Tensor]) -> tuple[Forward, Forward]:
        import openvino

        simulated = self._calibrated(model, batches)
        core = openvino.Core()
        converted = openvino.convert_model(copy.deepcopy(simulated), example_input=batches[0])
        # Without the hint it takes bfloat16 where the processor has it, and has no kernels for the small networks then.
        settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        compiled = core.compile_model(converted, "CPU", settings)
        return simulated, lambda x: torch.from_numpy(compiled(x.numpy())[0])


class Brevitas:
    """Brevitas: its graph quantization with int8 weights and activations, deployed in ONNX Runtime as QCDQ."""

    requirements = ("brevitas==0.13.4", "onnxscript==0.7.2", "onnxoptimizer==0.4.2")
    deployed_in = "ONNX Runtime"

    def _quantized(self, model: nn.Module) -> nn.Module:
        from brevitas.graph.quantize import preprocess_for_quantize, quantize

        return quantize(preprocess_for_quantize(model))

    def training(self, model: nn.Module, example: Tensor) -> nn.Module:
        return self._calibrated(model, [example]).train()

    def _calibrated(self, model: nn.Module, batches: Sequence[Tensor]) -> nn.Module:
        from brevitas.graph.calibrate import calibration_mode

        quantized = self._quantized(model)
        with torch.no_grad(), calibration_mode(quantized):
            for batch in batches:
                quantized(batch)
        return quantized

    def calibration_seconds(self, model: nn.Module, batch: Tensor) -> Iterator[float]:
        from brevitas.graph.calibrate import calibration_mode

        quantized = self._quantized(model)
        with calibration_mode(quantized):
            yield from _repeated(quantized, batch)

    def quantized(self, model: nn.Module, batches: Sequence[Tensor]) -> tuple[Forward, Forward]:
        from brevitas.export import export_onnx_qcdq

        simulated = self._calibrated(model, batches).eval()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            export_onnx_qcdq(simulated, args=batches[0], export_path=str(file), dynamo=False)
            return simulated, in_onnx_runtime(file)


def modelopt_calibrating(model: nn.Module, calibrator: str) -> nn.Module:
    """The model with ModelOpt's quantizers, which collect statistics: to call it is a batch of calibration."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.nn import TensorQuantizer

    config = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
    for entry in config["quant_cfg"]:
        if entry["quantizer_name"] == "*input_quantizer":
            entry["cfg"]["calibrator"] = calibrator
    config["algorithm"] = None
    quantized = mtq.quantize(model, config)
    for module in quantized.modules():
        if isinstance(module, TensorQuantizer) and module.is_enabled:
            module.disable_quant()
            module.enable_calib()
    return quantized


class ModelOpt:
    """ModelOpt's INT8_DEFAULT_CFG, deployed in ONNX Runtime as QDQ."""

    requirements = ("nvidia-modelopt==0.47.0", "onnxscript==0.7.2")
    deployed_in = "ONNX Runtime"

    def _calibrated(self, model: nn.Module, batches: Sequence[Tensor]) -> nn.Module:
        import modelopt.torch.quantization as mtq

        def run(quantized: nn.Module) -> None:
            for batch in batches:
                quantized(batch)

        return mtq.quantize(model, copy.deepcopy(mtq.INT8_DEFAULT_CFG), run)

    def training(self, model: nn.Module, example: Tensor) -> nn.Module:
        return self._calibrated(model, [example]).train()

    def calibration_seconds(self, model: nn.Module, batch: Tensor) -> Iterator[float]:
        return _repeated(modelopt_calibrating(model, "max"), batch)

    def quantized(self, model: nn.Module, batches: Sequence[Tensor]) -> tuple[Forward, Forward]:
        simulated = self._calibrated(model, batches).eval()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file = Path(folder) / "model.onnx"
            torch.onnx.export(simulated, (batches[0],), str(file), dynamo=False, opset_version=17)
            return simulated, in_onnx_runtime(file)


class Aimet:
    """AIMET's simulation with the settings of its quick start, deployed in ONNX Runtime as QDQ."""

    requirements = ("aimet-torch==2.42.0", "torchvision==0.28.0", "onnxscript==0.7.2")
    deployed_in = "ONNX Runtime"

    def _simulation(self, model: nn.Module, example: Tensor) -> Any:
        _stand_in_for_torchvision()
        from aimet_torch.batch_norm_fold import fold_all_batch_norms
        from aimet_torch.model_preparer import prepare_model
        from aimet_torch.quantsim import QuantizationSimModel

        prepared = prepare_model(model.eval())
        fold_all_batch_norms(prepared, tuple(example.shape), dummy_input=example)
        return QuantizationSimModel(prepared, example, default_output_bw=8, default_param_bw=8)

    def _calibrated(self, model: nn.Module, batches: Sequence[Tensor]) -> Any:
        simulation = self._simulation(model, batches[0])
        simulation.compute_encodings(lambda quantized: [quantized(batch) for batch in batches])
        return simulation

    def training(self, model: nn.Module, example: Tensor) -> nn.Module:
        return self._calibrated(model, [example]).model.train()

    def calibration_seconds(self, model: nn.Module, batch: Tensor) -> Iterator[float]:
        """What five batches more add, as statistics become ranges when all have been seen."""
        simulation = self._simulation(model, batch)

        def seconds(count: int) -> float:
            return _timed(lambda: simulation.compute_encodings(lambda net: [net(batch) for _ in range(count)]))

        while True:
            yield (seconds(6) - seconds(1)) / 5

    def quantized(self, model: nn.Module, batches: Sequence[Tensor]) -> tuple[Forward, Forward]:
        simulation = self._calibrated(model, batches)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            simulation.onnx.export((batches[0],), str(file), dynamo=False, opset_version=17)
            return simulation.model, in_onnx_runtime(file)


def _stand_in_for_torchvision() -> None:
    """torchvision's wheels on PyPI need CUDA for their compiled operators; AIMET imports it, and calls none of them."""
    if importlib.util.find_spec("torchvision") and not torch.cuda.is_available():
        for name in ("nms", "qnms"):
            with suppress(RuntimeError):  # defined before
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{name}", schema)


TOOLKITS: dict[str, type[Toolkit]] = {
    "ours, ONNX": Ours,
    "ours, torch": OursInTorch,
    "torch.ao FX": TorchAo,
    "torchao PT2E": TorchAoPt2e,
    "NNCF": Nncf,
    "Brevitas": Brevitas,
    "ModelOpt": ModelOpt,
    "AIMET": Aimet,
}
