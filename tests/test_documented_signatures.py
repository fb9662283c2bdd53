"""Signatures that the vendor's documents print, compared with those of the package.

Arguments have the documented names, order and defaults; further ones may follow.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from horizon_plugin_pytorch.dtype import as_dtype
from horizon_plugin_pytorch.quantization.fake_quantize import FakeQuantize
from horizon_plugin_pytorch.quantization.fuse_modules import fuse_known_modules
from horizon_plugin_pytorch.quantization.observer import MovingAverageMinMaxObserver

_COMMON = (
    "averaging_constant=0.01, ch_axis=-1, dtype='qint8', qscheme=torch.per_tensor_symmetric, quant_min=None, "
    "quant_max=None, is_sync_quantize=False, factory_kwargs=None"
)
_FIRST = (
    "dtype=torch.qint8, qscheme=torch.{}, quant_min=None, quant_max=None, is_sync_quantize=False, factory_kwargs=None"
)
_DETECTION = (
    "score_threshold=0, regression_scale=None, background_class_idx=None, size_threshold=None, image_size=None, "
    "pre_decode_top_n=None, post_decode_top_n=None, iou_threshold=None, pre_nms_top_n=None, post_nms_top_n=None, "
    "nms_on_each_level=False, mode='normal'"
)

# Path in the package: documented arguments; `...` where a default is not printed.
DOCUMENTED = {
    "set_march": "march",
    "march.set_march": "march",
    "bgr2gray": "input",
    "rgb2gray": "input",
    "bgr2centered_gray": "input",
    "rgb2centered_gray": "input",
    "bgr2rgb": "input",
    "rgb2bgr": "input",
    "bgr2yuv": "input, swing='studio'",
    "rgb2yuv": "input, swing='studio'",
    "bgr2centered_yuv": "input, swing='studio'",
    "rgb2centered_yuv": "input, swing='studio'",
    "centered_yuv2rgb": "input, swing='studio', mean=(128.0,), std=(128.0,), q_scale=1 / 128",
    "centered_yuv2bgr": "input, swing='studio', mean=(128.0,), std=(128.0,), q_scale=1 / 128",
    "dtype.qinfo": "dtype",
    "qat_mode.set_qat_mode": "mode",
    "quantization.prepare": "model, example_inputs=..., qconfig_setter=..., method=...",
    "quantization.prepare_qat_fx": (
        "model, qconfig_dict=None, prepare_custom_config_dict=None, optimize_graph=False, hybrid=False, "
        "hybrid_dict=None, opset_version='hbdk3', example_inputs=None, qconfig_setter=None, verbose=0"
    ),
    "quantization.prepare_qat": (
        "model, mapping=None, inplace=False, optimize_graph=False, hybrid=False, optimize_kwargs=None, "
        "example_inputs=None, qconfig_setter=None, verbose=0"
    ),
    "quantization.prepare_calibration": "model, inplace=False",
    "quantization.prepare_calibration_fx": (
        "model, qconfig_dict=None, prepare_custom_config_dict=None, optimize_graph=False, hybrid=False, "
        "hybrid_dict=None"
    ),
    "quantization.convert": "module, mapping=None, inplace=False, remove_qconfig=True, fast_mode=False",
    "quantization.convert_fx": (
        "graph_module, inplace=False, convert_custom_config_dict=None, _remove_qconfig=True, fast_mode=False"
    ),
    "quantization.fuse_fx": "model, fuse_custom_config_dict=None, fuse_mode=...",
    "quantization.fuse_modules": (
        "model, modules_to_fuse, inplace=False, fuser_func=fuse_known_modules, fuse_custom_config_dict=None"
    ),
    "quantization.fuse_known_modules": "mod_list, is_qat=False, additional_fuser_method_mapping=None",
    "quantization.load_observer_params": "src_model, dst_model",
    "quantization.load_calib_state_dict": "model, state_dict",
    "quantization.weight_reconstruction": "calib_model, batches, batch_process_func=None, custom_config_dict=None",
    "quantization.auto_calibrate": (
        "calib_model, batches, num_batches=10, batch_process_func=None, "
        "observer_list=('percentile', 'mse', 'kl', 'min_max'), percentile_list=None"
    ),
    "quantization.QuantStub": "scale=None, zero_point=None, qconfig=None",
    "quantization.check_model": (
        "module, example_inputs, march=None, input_source='ddr', advice=None, check_quanti_param=True"
    ),
    "utils.quant_profiler.check_deploy_device": "model, print_tabulate=True, out_dir=None",
    "utils.quant_profiler.featuremap_similarity": (
        "model1, model2, inputs, similarity_func='Cosine', threshold=None, devices=None, out_dir=None"
    ),
    "utils.quant_profiler.get_raw_features": (
        "model, example_inputs, prefixes=(), types=(), device=None, preserve_int=False, use_class_name=False, "
        "skip_identity=False"
    ),
    "utils.quant_profiler.profile_featuremap": (
        "featuremap, with_tensorboard=False, tensorboard_dir=None, print_per_channel_scale=False, "
        "show_per_channel=False, out_dir=None, file_name=None"
    ),
    "utils.quant_profiler.compare_weights": (
        "float_model, qat_quantized_model, similarity_func='Cosine', with_tensorboard=False, tensorboard_dir=None, "
        "out_dir=None"
    ),
    "utils.quant_profiler.script_profile": (
        "model, example_inputs, out_dir=None, march=None, mark_node_func=None, compare_with_hbdk_parser=True"
    ),
    "utils.quant_profiler.compare_script_models": "model1, model2, example_inputs, march=None",
    "quantization.export_hbir": "module, example_inputs, hbir, march=None",
    "quantization.visualize_model": "module, example_inputs, march=None, save_path=None, show=True",
    "quantization.compile_model": (
        "module, example_inputs, hbm, march=None, name=None, input_source='ddr', input_layout=None, "
        "output_layout='NCHW', opt='O2', balance_factor=2, progressbar=True, jobs=16, debug=True, extra_args=None"
    ),
    "quantization.hbdk4.export": (
        "model, example_inputs, name='forward', input_names=None, output_names=None, input_descs=None, "
        "output_descs=None, native_pytree=True"
    ),
    "quantization.hbdk4.pre_export": "model, inplace=False",
    "jit.save": "m, f, _extra_files=None",
    "jit.load": "f, map_location=None, _extra_files=None",
    "jit.to_device": "script_module, device",
    "utils.quant_profiler.show_cuda_memory_consumption": (
        "model, example_inputs, device, check_leaf_module=None, out_dir=None, file_name=None, custom_backward=None"
    ),
    "utils.quant_profiler.set_preserve_qat_mode": "model, prefixes=(), types=(), value=True",
    "quantization.observer_v2.MinMaxObserver": _COMMON,
    "quantization.observer_v2.MixObserver": _COMMON,
    "quantization.observer_v2.PercentileObserver": f"percentile=99.99, bins=2048, {_COMMON}",
    "quantization.observer_v2.MSEObserver": f"stride=1, {_COMMON}",
    "quantization.observer_v2.KLObserver": f"bins=512, update_interval=1, {_COMMON}",
    "quantization.observer_v2.FixedScaleObserver": "scale, zero_point=0, dtype='qint8', qscheme=..., ch_axis=-1",
    "quantization.observer_v2.HistogramObserver.reset_scale": "model, method=..., method_kwargs=..., dtype=...",
    "quantization.observer.MovingAverageMinMaxObserver": (
        f"averaging_constant=0.01, {_FIRST.format('per_tensor_symmetric')}"
    ),
    "quantization.observer.MovingAveragePerChannelMinMaxObserver": (
        f"averaging_constant=0.01, ch_axis=0, {_FIRST.format('per_channel_symmetric')}"
    ),
    "quantization.fake_quantize.FakeQuantize": (
        "observer=MovingAverageMinMaxObserver, saturate=None, in_place=False, compat_mask=True, channel_len=1"
    ),
    "quantization.fake_quantize.CalibFakeQuantize": (
        "observer=..., saturate=None, in_place=False, compat_mask=True, channel_len=1"
    ),
    "quantization.learnable_fake_quantize._LearnableFakeQuantize": (
        "observer=MovingAverageMinMaxObserver, saturate=None, in_place=False, compat_mask=True, channel_len=1"
    ),
    "quantization.learnable_fake_quantize.PACTFakeQuantize": (
        "observer=MovingAverageMinMaxObserver, saturate=None, in_place=False, compat_mask=True, channel_len=1"
    ),
    "quantization.fake_quantize.FakeQuantize.set_qparams": "self, scale, zero_point=None",
    "quantization.fake_cast.FakeCast": "dtype=torch.float16",
    "quantization.get_default_qconfig": (
        "activation_fake_quant='fake_quant', weight_fake_quant='fake_quant', activation_observer='min_max', "
        "weight_observer='min_max', activation_qkwargs=None, weight_qkwargs=None"
    ),
    "quantization.get_default_qat_qconfig": (
        "dtype='qint8', weight_dtype='qint8', activation_fake_quant='fake_quant', weight_fake_quant='fake_quant', "
        "activation_qkwargs=None, weight_qkwargs=None, backend=''"
    ),
    "quantization.get_default_qat_out_qconfig": (
        "dtype='qint8', weight_fake_quant='fake_quant', weight_qkwargs=None, backend=''"
    ),
    "quantization.get_default_calib_qconfig": "dtype='qint8', calib_qkwargs=None, backend=''",
    "quantization.get_qconfig": "observer=..., in_dtype=..., weight_dtype=..., out_dtype=..., fix_scale=False",
    "quantization.qconfig_setter.ModuleNameTemplate": "config_mapping, freeze=False",
    "quantization.qconfig_setter.ConvDtypeTemplate": "input_dtype=..., weight_dtype=...",
    "quantization.qconfig_setter.MatmulDtypeTemplate": "input_dtypes=...",
    "quantization.qconfig_setter.SensitivityTemplate": (
        "sensitive_table, topk_or_ratio=..., sensitive_type=..., low_precision_dtype=..., high_precision_dtype=..."
    ),
    "quantization.qconfig_setter.SetDynamicQuantTemplate": "op_kwargs=...",
    "quantization.qconfig_setter.QconfigSetter": "reference_qconfig=..., templates=..., enable_optimize=...",
    "nn.BgrToYuv444": "channel_reversal=False",
    "nn.Correlation": "kernel_size=1, max_displacement=1, stride1=1, stride2=1, pad_size=0, is_multiply=True",
    "nn.DetectionPostProcess": _DETECTION,
    "nn.DetectionPostProcessV1": (
        "num_classes, box_filter_threshold, class_offsets, use_clippings, image_size, nms_threshold, pre_nms_top_k, "
        "post_nms_top_k, nms_padding_mode=None, nms_margin=0.0, use_stable_sort=None, bbox_min_hw=(0, 0)"
    ),
    "nn.RcnnPostProcess": (
        "image_size=(1024, 1024), nms_threshold=0.3, box_filter_threshold=0.1, num_classes=1, post_nms_top_k=100, "
        "delta_mean=(0.0,) * 4, delta_std=(1.0,) * 4"
    ),
    "nn.RcnnPostProcess.forward": "self, boxes, scores, deltas, image_sizes=None",
    "nn.PointPillarsScatter": "output_shape=None",
    "nn.PointPillarsScatter.forward": "self, voxel_features, coords, output_shape=None",
    "nn.MultiScaleDeformableAttention": (
        "embed_dims=256, num_heads=8, num_levels=4, num_points=4, im2col_step=64, dropout=0.1, batch_first=False, "
        "value_proj_ratio=1.0"
    ),
    "nn.SoftmaxBernoulli2": "dim=None, max_value_only=False",
    "nn.functional.filter": "*inputs, threshold, idx_range=None",
    "nn.functional.point_pillars_preprocess": (
        "points_list, pc_range, voxel_size, max_voxels, max_points_per_voxel, use_max=..., norm_range=..., "
        "norm_dims=..."
    ),
    "utils.fx_helper.wrap": "obj=..., skip_compile=False",  # `wrap(obj)` in the older documents
    "utils.check_model.check_qat_model": "model, example_inputs",
}


def _find(path: str) -> Any:
    module, found = "horizon_plugin_pytorch", importlib.import_module("horizon_plugin_pytorch")
    for name in path.split("."):
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
        found, module = getattr(found, name), f"{module}.{name}"
    return found


def _documented(arguments: str) -> dict[str, inspect.Parameter]:
    scope: dict[str, Any] = {
        "torch": torch,
        "fuse_known_modules": fuse_known_modules,
        "MovingAverageMinMaxObserver": MovingAverageMinMaxObserver,
    }
    exec(f"def documented({arguments}): pass", scope)
    return dict(inspect.signature(scope["documented"]).parameters)


def _is_same(name: str, ours: Any, theirs: Any) -> bool:
    if name == "dtype" and theirs not in (torch.float16, inspect.Parameter.empty):
        return as_dtype(ours) == as_dtype(theirs)
    return ours == theirs


@pytest.mark.parametrize("path", DOCUMENTED)
def test_documented_signature(path: str) -> None:
    found, documented = inspect.signature(_find(path)).parameters, _documented(DOCUMENTED[path])
    missing = [name for name in documented if name not in found]
    assert not missing, f"{path} has no {missing}"
    positional = [p.name for p in found.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    expected = [p.name for p in documented.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[: len(expected)] == expected, f"{path}: order {positional}"
    for name, theirs in documented.items():
        if theirs.default is not ...:
            assert _is_same(name, found[name].default, theirs.default), f"{path}: {name}={found[name].default!r}"
    further = [p for n, p in found.items() if n not in documented and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert all(p.default is not p.empty for p in further), f"{path} demands more than the documents say"


OBSERVERS = [path for path in DOCUMENTED if path.startswith("quantization.observer") and path.endswith("Observer")]


@pytest.mark.parametrize("path", OBSERVERS)
def test_each_argument_of_an_observer_acts(path: str) -> None:
    cls = _find(path)
    extra = {"scale": 0.5} if "scale" in inspect.signature(cls).parameters else {}
    is_per_channel = "PerChannel" in path
    observer = cls(**extra, dtype="qint16", quant_min=-100, quant_max=100, factory_kwargs={"dtype": torch.float64})
    assert str(observer.dtype) == "qint16" and (observer.quant_min, observer.quant_max) == (-100, 100)
    assert observer.min_val.dtype is torch.float64
    assert cls(**extra, is_sync_quantize=True).is_sync_quantize is True
    if not path.endswith("MovingAverageMinMaxObserver") and not extra:
        by_channel = cls(qscheme=torch.per_channel_symmetric, ch_axis=1)
        by_channel(torch.tensor([[1.0, -2.0, 3.0], [1.0, 2.0, 4.0]]))
        assert by_channel.max_val.shape == (3,)
    if extra or is_per_channel or "KL" in path:
        return
    for constant, nearer in ((0.0, 1.0), (1.0, 8.0)):
        observer = cls(averaging_constant=constant)
        for largest in (1.0, 8.0):
            observer(torch.linspace(-largest, largest, 1001))
        assert abs(float(observer.max_val) - nearer) < 0.1


@pytest.mark.parametrize("path", OBSERVERS)
def test_an_unknown_argument_of_an_observer_is_an_error(path: str) -> None:
    cls = _find(path)
    extra = {"scale": 0.5} if "scale" in inspect.signature(cls).parameters else {}
    with pytest.raises(TypeError, match="averaging_konstant"):
        cls(**extra, averaging_konstant=0.1)


def test_an_observer_of_the_user_shows_what_it_passes_on() -> None:
    class Doubled(MovingAverageMinMaxObserver):
        def __init__(self, factor: float = 2.0, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.factor = factor

    names = list(inspect.signature(Doubled).parameters)
    assert list(inspect.signature(Doubled.__init__).parameters) == ["self", *names]
    assert names[:3] == ["factor", "averaging_constant", "dtype"]
    assert FakeQuantize(Doubled, factor=3.0).activation_post_process.factor == 3.0
    assert isinstance(Doubled(), nn.Module)


def test_trained_scales_show_their_switch() -> None:
    for name in ("_LearnableFakeQuantize", "PACTFakeQuantize"):
        found = inspect.signature(_find(f"quantization.{name}")).parameters
        assert found["use_grad_scaling"].default is True and next(iter(found)) == "observer"


def test_memory_estimate_ratio_warns() -> None:
    with pytest.warns(UserWarning, match="memory_estimate_ratio"):
        _find("quantization.observer_v2.MSEObserver")(memory_estimate_ratio=0.5)
