"""The public surface: names, signatures and import paths, compared with the snapshot in `public_api.txt`.

After an intended change run ``python -m tests.test_public_api`` and commit the new snapshot with the change.
"""

from __future__ import annotations

import doctest
import enum
import importlib
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

PACKAGE = "horizon_plugin_pytorch"
SNAPSHOT = Path(__file__).parent / "public_api.txt"

MODULES = [
    ".",
    ".quantization",
    ".quantization.qconfig",
    ".quantization.observer",
    ".quantization.observer_v2",
    ".quantization.fake_quantize",
    ".quantization.stubs",
    ".quantization.qconfig_setter",
    ".quantization.qconfig_template",
    ".quantization.quantization_mappings",
    ".quantization.quantize",
    ".quantization.quantize_fx",
    ".quantization.fuse_modules",
    ".quantization.fx",
    ".quantization.hbdk4",
    ".march",
    ".dtype",
    ".qtensor",
    ".qat_mode",
    ".asking",
    ".errors",
    ".functional",
    ".jit",
    ".nn",
    ".nn.functional",
    ".nn.intrinsic",
    ".nn.qat",
    ".nn.quantized",
    ".nn.operator_table",
    ".utils.onnx_helper",
    ".utils.fx_helper",
    ".utils.misc",
    ".utils.quant_profiler",
    ".utils.serialization",
    ".annotation",
    ".qconfig",
    ".compiled",
    "horizon_plugin_profiler",
    "horizon_plugin_profiler.model_profilerv2",
    "horizon_plugin_profiler.hbir_model_profiler",
    "horizon_plugin_profiler.consistency_profiler",
    "horizon_plugin_profiler.utils.model_helper",
]

# What our pages tell users to call of modules whose other names are the package's own affair.
OWN_PATHS = [
    "fixed_point.are_kernels_used",
    "fixed_point.integer_kernels",
    "fixed_point.use_integer_kernels",
]

# Every path that the vendor's guides, or public code counted in the usage survey, import and that this version has.
GUIDE_PATHS = [
    "March",
    "March.NASH_E",
    "__version__",
    "argmax",
    "box3d_iou",
    "box3d_iou_bev",
    "box3d_overlap_bev",
    "dtype",
    "dtype.QINT16_MAX",
    "dtype.QINT8_MAX",
    "dtype.QuantDType",
    "dtype.qbool",
    "dtype.qinfo",
    "dtype.qint16",
    "dtype.qint32",
    "dtype.qint8",
    "functional.batched_nms_with_padding",
    "functional.centered_yuv2rgb",
    "functional.nms",
    "functional.nms_rotated",
    "functional.rgb2centered_yuv",
    "functional.sort",
    "fx.fx_helper.wrap",
    "fx.jit_scheme.Tracer",
    "fx.jit_scheme.Tracer.dynamic_block",
    "fx.jit_scheme.Tracer.is_tracing",
    "fx.jit_scheme.dynamic_block",
    "get_march",
    "get_output_annotation",
    "march",
    "march.March",
    "march.March.BAYES",
    "march.March.Bayes",
    "march.March.Bernoulli2",
    "march.March.NASH_B",
    "march.March.NASH_E",
    "march.March.NASH_M",
    "march.March.NASH_P",
    "march.get_march",
    "march.set_march",
    "multi_tensor_legacynadamex",
    "nms3d",
    "nn",
    "nn.AnchorGenerator",
    "nn.ChannelScale2d",
    "nn.Correlation",
    "nn.Cos",
    "nn.DetectionPostProcess",
    "nn.DetectionPostProcessV1",
    "nn.Exp",
    "nn.GridSample",
    "nn.Interpolate",
    "nn.LayerNorm",
    "nn.MultiScaleDeformableAttention",
    "nn.MultiScaleRoIAlign",
    "nn.RcnnPostProcess",
    "nn.Reciprocal",
    "nn.Sin",
    "nn.SoftmaxBernoulli2",
    "nn.Sqrt",
    "nn.Where",
    "nn.bgr_to_yuv444",
    "nn.bgr_to_yuv444.bgr_to_yuv444",
    "nn.detection_post_process.DetectionPostProcess",
    "nn.functional.batched_nms",
    "nn.functional.bgr_to_yuv444",
    "nn.functional.decode",
    "nn.functional.filter",
    "nn.functional.get_top_n",
    "nn.functional.ig_region_match",
    "nn.functional.max_iou_match",
    "nn.functional.nms",
    "nn.functional.point_pillars_preprocess",
    "nn.functional.point_pillars_scatter",
    "nn.functional.rle",
    "nn.functional.window_partition",
    "nn.functional.window_reverse",
    "nn.intrinsic",
    "nn.layer_norm.LayerNorm",
    "nn.qat",
    "nn.qat.Conv2d",
    "nn.qat.ConvAddReLU2d",
    "nn.qat.GridSample",
    "nn.qat.Interpolate",
    "nn.qat.Linear",
    "nn.qat.MultiScaleRoIAlign",
    "nn.qat.Softmax",
    "nn.qat.avg_pool2d.AvgPool2d",
    "nn.qat.batchnorm.BatchNorm2d",
    "nn.qat.conv2d",
    "nn.qat.conv2d.Conv2d",
    "nn.qat.conv2d.ConvAddReLU2d",
    "nn.qat.functional_modules.FloatFunctional",
    "nn.qat.interpolate.Interpolate",
    "nn.qat.linear.Linear",
    "nn.qat.relu.ReLU",
    "nn.qat.segment_lut.SegmentLUT",
    "nn.qat.stubs.DeQuantStub",
    "nn.qat.stubs.QuantStub",
    "nn.qat.upsampling.Upsample",
    "nn.qat.upsampling.UpsamplingBilinear2d",
    "nn.quantized",
    "nn.quantized.FloatFunctional",
    "nn.quantized.FloatFunctional.add",
    "nn.quantized.QFunctional",
    "nn.quantized.avg_pool2d.AvgPool2d",
    "nn.quantized.conv2d.Conv2d",
    "nn.quantized.functional_impl._voxelization",
    "nn.quantized.functional_modules.FloatFunctional",
    "nn.quantized.functional_modules.FloatFunctional.add",
    "nn.quantized.functional_modules.QFunctional",
    "nn.quantized.interpolate.Interpolate",
    "nn.quantized.quantize.DeQuantize",
    "nn.quantized.quantize.Quantize",
    "nn.quantized.relu.ReLU",
    "nn.quantized.segment_lut.SegmentLUT",
    "nn.quantized.upsampling.Upsample",
    "nn.quantized.upsampling.UpsamplingBilinear2d",
    "qat_mode",
    "qat_mode.ConsistencyStrategy",
    "qat_mode.ConsistencyStrategy.set_consistency_level",
    "qat_mode.QATMode",
    "qat_mode.QATMode.FuseBN",
    "qat_mode.get_qat_mode",
    "qat_mode.set_qat_mode",
    "qat_mode.tricks",
    "qat_mode.tricks.fx_force_duplicate_shared_convbn",
    "qconfig.default_calib_8bit_fake_quant_qconfig",
    "qtensor.QTensor",
    "quantization",
    "quantization.CalibFakeQuantize",
    "quantization.DeQuantStub",
    "quantization.FakeQuantState",
    "quantization.FakeQuantState.CALIBRATION",
    "quantization.FakeQuantState.QAT",
    "quantization.FakeQuantState.VALIDATION",
    "quantization.FakeQuantState._FLOAT",
    "quantization.FakeQuantize",
    "quantization.FakeQuantize.with_args",
    "quantization.FixedScaleObserver",
    "quantization.March",
    "quantization.March.BAYES",
    "quantization.March.NASH_E",
    "quantization.March.NASH_M",
    "quantization.MovingAverageMinMaxObserver",
    "quantization.MovingAveragePerChannelMinMaxObserver",
    "quantization.PACTFakeQuantize",
    "quantization.PrepareMethod",
    "quantization.PrepareMethod.EAGER",
    "quantization.QATMode",
    "quantization.QATMode.WithBN",
    "quantization.QconfigSetter",
    "quantization.QuantStub",
    "quantization.QuantWrapper",
    "quantization._LearnableFakeQuantize",
    "quantization.auto_calibrate",
    "quantization.auto_calibration",
    "quantization.check_model",
    "quantization.compile_model",
    "quantization.convert",
    "quantization.convert_fx",
    "quantization.default_8bit_fake_quant",
    "quantization.default_calib_8bit_fake_quant_qconfig",
    "quantization.default_qat_8bit_fake_quant_qconfig",
    "quantization.default_weight_8bit_fake_quant",
    "quantization.export_hbir",
    "quantization.fake_quantize.CalibFakeQuantize",
    "quantization.fake_quantize.DynamicFakeQuantize",
    "quantization.fake_quantize.FakeQuantState",
    "quantization.fake_quantize.FakeQuantize",
    "quantization.fake_quantize.FakeQuantize.with_args",
    "quantization.freeze_qat_module",
    "quantization.fuse_conv_shared_modules",
    "quantization.fuse_fx",
    "quantization.fuse_known_modules",
    "quantization.fuse_modules",
    "quantization.fx.graph_module.GraphModuleWithAttr",
    "quantization.fx.graph_module.ObservedGraphModule",
    "quantization.fx.graph_module.QuantizedGraphModule",
    "quantization.fx.split_compilable_model",
    "quantization.get_default_calib_qconfig",
    "quantization.get_default_qat_out_qconfig",
    "quantization.get_default_qat_qconfig",
    "quantization.get_default_qconfig",
    "quantization.get_qconfig",
    "quantization.load_calib_state_dict",
    "quantization.load_observer_params",
    "quantization.mix_calibration",
    "quantization.observer",
    "quantization.observer.FixedScaleObserver",
    "quantization.observer.MovingAverageMinMaxObserver",
    "quantization.observer.MovingAveragePerChannelMinMaxObserver",
    "quantization.observer_v2.FixedScaleObserver",
    "quantization.observer_v2.HistogramObserver",
    "quantization.observer_v2.HistogramObserver.reset_scale",
    "quantization.observer_v2.MinMaxObserver",
    "quantization.observer_v2.PercentileObserver",
    "quantization.per_channel_qat_8bit_qconfig",
    "quantization.perf_model",
    "quantization.prepare",
    "quantization.prepare.PrepareMethod",
    "quantization.prepare.PrepareMethod.JIT_STRIP",
    "quantization.prepare.prepare",
    "quantization.prepare_calibration",
    "quantization.prepare_qat",
    "quantization.prepare_qat_fx",
    "quantization.qconfig",
    "quantization.qconfig.QConfig",
    "quantization.qconfig.default_calib_8bit_fake_quant_qconfig",
    "quantization.qconfig.default_calib_8bit_weight_16bit_act_fake_quant_qconfig",
    "quantization.qconfig.default_calib_8bit_weight_32bit_out_fake_quant_qconfig",
    "quantization.qconfig.default_calib_out_8bit_fake_quant_qconfig",
    "quantization.qconfig.default_qat_8bit_fake_quant_qconfig",
    "quantization.qconfig.default_qat_8bit_fixed_act_fake_quant_qconfig",
    "quantization.qconfig.default_qat_8bit_weight_16bit_act_fake_quant_qconfig",
    "quantization.qconfig.default_qat_8bit_weight_16bit_fixed_act_fake_quant_qconfig",
    "quantization.qconfig.default_qat_8bit_weight_32bit_out_fake_quant_qconfig",
    "quantization.qconfig.default_qat_out_8bit_fake_quant_qconfig",
    "quantization.qconfig.get_default_qconfig",
    "quantization.qconfig.per_channel_qat_8bit_qconfig",
    "quantization.qconfig_setter.ConvDtypeTemplate",
    "quantization.qconfig_setter.MatmulDtypeTemplate",
    "quantization.qconfig_setter.ModuleNameTemplate",
    "quantization.qconfig_setter.QconfigSetter",
    "quantization.qconfig_setter.SensitivityTemplate",
    "quantization.qconfig_setter.SetDynamicQuantTemplate",
    "quantization.qconfig_template.ModuleNameQconfigSetter",
    "quantization.qconfig_template.calibration_8bit_weight_16bit_act_qconfig_setter",
    "quantization.qconfig_template.default_calibration_qconfig_setter",
    "quantization.qconfig_template.default_qat_fixed_act_qconfig_setter",
    "quantization.qconfig_template.default_qat_qconfig_setter",
    "quantization.qconfig_template.qat_8bit_weight_16bit_act_qconfig_setter",
    "quantization.qconfig_template.qat_8bit_weight_16bit_fixed_act_qconfig_setter",
    "quantization.qconfig_template.sensitive_op_calibration_8bit_weight_16bit_act_qconfig_setter",
    "quantization.qconfig_template.sensitive_op_qat_8bit_weight_16bit_act_qconfig_setter",
    "quantization.qconfig_template.sensitive_op_qat_8bit_weight_16bit_fixed_act_qconfig_setter",
    "quantization.qinfo",
    "quantization.qint16",
    "quantization.qint8",
    "quantization.quantization_mappings.get_qat_module_mappings",
    "quantization.quantize_fx",
    "quantization.quantize_fx.QuantizationTracer",
    "quantization.quantize_fx.convert_fx",
    "quantization.quantize_fx.fuse_fx",
    "quantization.quantize_fx.prepare_qat_fx",
    "quantization.set_fake_quantize",
    "quantization.set_qat_mode",
    "quantization.stubs.QuantStub",
    "quantization.visualize_model",
    "quantization.weight_reconstruction",
    "set_annotation",
    "set_march",
    "utils",
    "utils.fx_helper.wrap",
    "utils.misc.pytree_convert",
    "utils.misc.tensor_struct_repr",
    "utils.onnx_helper",
    "utils.onnx_helper.export_quantized_onnx",
    "utils.onnx_helper.export_to_onnx",
    "jit.load",
    "jit.save",
    "jit.to_device",
    "utils.quant_profiler.check_deploy_device",
    "utils.quant_profiler.compare_weights",
    "utils.quant_profiler.featuremap_similarity",
    "utils.quant_profiler.get_raw_features",
    "utils.quant_profiler.profile_featuremap",
    "utils.quant_profiler.compare_script_models",
    "utils.quant_profiler.script_profile",
    "utils.quant_profiler.set_preserve_qat_mode",
    "utils.quant_profiler.show_cuda_memory_consumption",
    "utils.serialization.get_version_from_scriptmodule",
    "utils.serialization.save_with_version",
]

# What users call; each shows an example that runs.
USER_FUNCTIONS = [
    "march.set_march",
    "march.get_march",
    "dtype.qinfo",
    "qtensor.QTensor",
    "qat_mode.set_qat_mode",
    "qat_mode.get_qat_mode",
    "fixed_point.use_integer_kernels",
    "compiled.use_compiled_passes",
    "quantization.prepare_qat_fx",
    "quantization.convert_fx",
    "quantization.fuse_fx",
    "quantization.prepare_qat",
    "quantization.convert",
    "quantization.fuse_modules",
    "quantization.fuse_known_modules",
    "quantization.load_observer_params",
    "quantization.set_fake_quantize",
    "quantization.get_default_qconfig",
    "quantization.get_default_qat_qconfig",
    "quantization.get_default_qat_out_qconfig",
    "quantization.get_default_calib_qconfig",
    "quantization.qconfig.QConfig",
    "quantization.FakeQuantize",
    "quantization.FakeQuantize.with_args",
    "quantization.FakeQuantize.set_qparams",
    "quantization.observer_v2.MinMaxObserver",
    "quantization.observer_v2.FixedScaleObserver",
    "quantization.QuantStub",
    "quantization.QuantWrapper",
    "nn.quantized.FloatFunctional",
    "nn.Interpolate",
    "nn.LayerNorm",
    "utils.onnx_helper.export_quantized_onnx",
    "utils.fx_helper.wrap",
    "utils.quant_profiler.check_deploy_device",
    "utils.quant_profiler.set_preserve_qat_mode",
]


def resolve(path: str) -> Any:
    """The object at a dotted path below the package; a function beats a module of the same name, as for users."""
    found: Any = importlib.import_module(PACKAGE)
    place = PACKAGE
    for name in filter(None, path.split(".")):
        if not hasattr(found, name):
            found = importlib.import_module(place)  # a function had the module's name
        if not hasattr(found, name):
            importlib.import_module(f"{place}.{name}")
        found, place = getattr(found, name), f"{place}.{name}"
    return found


def module_at(path: str) -> ModuleType:
    """The module at a dotted path, also where a function has the same name."""
    return importlib.import_module(PACKAGE + path.rstrip(".") if path.startswith(".") else path)


def is_ours(x: Any) -> bool:
    return (getattr(x, "__module__", None) or "").startswith(PACKAGE)


def public_names(module: ModuleType) -> list[str]:
    """`__all__` if there is one, else what the module defines itself."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = []
    for name, value in vars(module).items():
        is_definition = (inspect.isclass(value) or inspect.isroutine(value)) and value.__module__ == module.__name__
        is_value = (
            not inspect.ismodule(value)
            and not inspect.isroutine(value)
            and not inspect.isclass(value)
            and is_ours(type(value))
        )
        if not name.startswith("_") and (is_definition or is_value):
            own.append(name)
    return sorted(own)


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that the package, not torch or Python, gives the class."""
    found = {}
    for base in reversed(cls.__mro__):
        if is_ours(base):
            found.update({n: v for n, v in vars(base).items() if not n.startswith("_")})
    for name, value in sorted(found.items()):
        if isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value):
            yield name, value


def signature(function: Any) -> str:
    """Parameters and defaults, without annotations."""
    if inspect.isclass(function) and not is_ours(function.__new__) and not is_ours(function.__init__):
        return "(as its base)"  # torch's or Python's constructor, which may change with their version
    try:
        parsed = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parsed.parameters.values()]
    for index, parameter in enumerate(bare):
        default = parameter.default
        if default is not inspect.Parameter.empty and (inspect.isclass(default) or inspect.isfunction(default)):
            bare[index] = parameter.replace(default=_Named(default.__name__))  # without path or address
    return str(inspect.Signature(bare))


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def describe(path: str, value: Any) -> Iterator[str]:
    """One line for a name, and one for each member of a class of ours."""
    if inspect.ismodule(value):
        yield f"{path} module"
    elif inspect.isclass(value) and issubclass(value, enum.Enum):
        yield f"{path} enum {' '.join(value.__members__)}"
    elif inspect.isclass(value):
        yield f"{path} class {value.__module__}.{value.__qualname__}{signature(value)}"
        if is_ours(value):
            for name, member in public_members(value):
                function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                yield (
                    f"{path}.{name} property" if isinstance(member, property) else f"{path}.{name}{signature(function)}"
                )
    elif inspect.isroutine(value):
        yield f"{path}{signature(value)}"
    elif isinstance(value, str) and not is_ours(type(value)):
        yield f"{path} str"
    else:
        yield f"{path} {type(value).__name__}"


def current() -> str:
    """The snapshot as it is now."""
    lines: list[str] = []
    for path in MODULES:
        module = module_at(path)
        lines.append(f"# {module.__name__}")
        for name in public_names(module):
            value = getattr(module, name)
            # Members of a class are listed once, where it is defined or first shown.
            entry = list(describe(f"{module.__name__}.{name}", value))
            is_here = getattr(value, "__module__", None) == module.__name__ or not path.startswith(".")
            lines += entry if is_here else entry[:1]
    lines.append("# names of our pages in other modules")
    for path in OWN_PATHS:
        lines += describe(f"{PACKAGE}.{path}", resolve(path))
    lines.append("# paths of the guides")
    for path in GUIDE_PATHS:
        value = resolve(path)
        where = (
            f"{value.__module__}.{value.__qualname__}"
            if inspect.isclass(value) or inspect.isfunction(value)
            else type(value).__name__
        )
        lines.append(f"{PACKAGE}.{path} -> {where}")
    return "\n".join(lines) + "\n"


def test_public_surface_is_that_of_the_snapshot():
    wanted, found = SNAPSHOT.read_text().splitlines(), current().splitlines()
    gone, new = [x for x in wanted if x not in found], [x for x in found if x not in wanted]
    assert found == wanted, f"gone: {gone}; new: {new}; if intended run `python -m tests.test_public_api`"


@pytest.mark.parametrize("path", OWN_PATHS)
def test_names_of_our_pages_are_documented(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert name in module_at(f".{module}").__all__ and resolve(path).__doc__
    assert any(f"{path}(" in page.read_text() for page in (Path(__file__).parents[1] / "docs").glob("*.md"))


@pytest.mark.parametrize("path", GUIDE_PATHS)
def test_path_of_the_guides_imports(path):
    assert resolve(path) is not None


def _documented() -> Iterator[tuple[str, Any]]:
    for path in MODULES:
        module = module_at(path)
        yield module.__name__, module
        for name in public_names(module):
            value = getattr(module, name)
            if is_ours(value) and (inspect.isclass(value) or inspect.isroutine(value)):
                yield f"{module.__name__}.{name}", value
            if inspect.isclass(value) and is_ours(value):
                for member_name, member in public_members(value):
                    if member_name not in ("forward", "extra_repr", "train"):  # torch says what these are
                        yield f"{module.__name__}.{name}.{member_name}", member


def test_every_public_name_has_a_docstring():
    missing = []
    for path, value in _documented():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        own = function.__dict__.get("__doc__") if inspect.isclass(function) else function.__doc__
        if not own and not _inherits_a_docstring(path):
            missing.append(path)
    assert sorted(set(missing)) == []


def _inherits_a_docstring(path: str) -> bool:
    """A method that overrides a documented one does the same thing."""
    owner, _, name = path.rpartition(".")
    cls = resolve(owner.removeprefix(PACKAGE)) if owner.startswith(PACKAGE + ".") else None
    if not inspect.isclass(cls):
        return False
    return any(getattr(vars(base).get(name), "__doc__", None) for base in cls.__mro__)


def names_around(value: Any) -> dict[str, Any]:
    """What the file that defines a class or function has; it may be shown under another path."""
    methods = (
        (getattr(member, "__func__", member) for member in vars(value).values()) if isinstance(value, type) else ()
    )
    for function in (value, *methods):
        if inspect.isfunction(function) and function.__globals__.get("__name__", "").startswith(PACKAGE):
            return function.__globals__
    return vars(importlib.import_module(value.__module__))


@pytest.mark.parametrize("path", USER_FUNCTIONS)
def test_user_function_shows_an_example_that_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = resolve(path)
    globs = {**names_around(value), "torch": torch}
    tests = doctest.DocTestFinder(recurse=False).find(value, path, module=False, globs=globs)
    examples = [test for test in tests if test.examples]
    assert examples, f"`{path}` has no example"
    for test in examples:
        report: list[str] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = doctest.DocTestRunner().run(test, out=report.append)
        assert not result.failed, "".join(report)


if __name__ == "__main__":
    SNAPSHOT.write_text(current())
    print(f"wrote {SNAPSHOT}")
