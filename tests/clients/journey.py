"""The journey of a generated model, on every route that its code allows, and what must hold on the way."""

from __future__ import annotations

import ast
import copy
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from horizon_plugin_pytorch.errors import HorizonError
from horizon_plugin_pytorch.quantization import (
    FakeQuantState,
    PrepareMethod,
    calibrate,
    convert,
    get_default_qconfig,
    prepare,
    prepare_qat_fx,
    set_fake_quantize,
)
from horizon_plugin_pytorch.utils.onnx_helper import export_quantized_onnx
from tests.clients.model import WRITTEN_INPUTS, Generated, outputs_of, write
from tests.routes import mismatches, run_onnx

# Formats of activations and weights, and how far from float a few layers of them may be.
FORMATS = {"int8": ("qint8", "qint8", 0.6), "mixed": ("qint16", "qint8", 0.15), "int16": ("qint16", "qint16", 0.01)}


class Finding(Exception):
    """Something that must not happen."""


def _qconfig(formats: str) -> dict[str, Any]:
    activation, weight, _ = FORMATS[formats]
    return {"": get_default_qconfig(activation_qkwargs={"dtype": activation}, weight_qkwargs={"dtype": weight})}


def _by_running(model: nn.Module, g: Generated, formats: str) -> nn.Module:
    return prepare(model, g.inputs(0), qconfig_dict=_qconfig(formats), out_dir=None)


def _by_tracing(model: nn.Module, g: Generated, formats: str) -> nn.Module:
    if g.seed % 2:
        return prepare(model, g.inputs(0), qconfig_dict=_qconfig(formats), method=PrepareMethod.SYMBOLIC, out_dir=None)
    examples = {"example_inputs": g.inputs(0)} if g.style in WRITTEN_INPUTS else {}
    return prepare_qat_fx(model, _qconfig(formats), **examples)


ROUTES: dict[str, Callable[[nn.Module, Generated, str], nn.Module]] = {"running": _by_running, "tracing": _by_tracing}


def _run(model: nn.Module, g: Generated, seed: int) -> list[Tensor]:
    with torch.no_grad():
        return outputs_of(model(*g.inputs(seed)))


def _distance(got: list[Tensor], want: list[Tensor]) -> float:
    return max(
        (float((a - b).norm() / b.norm().clamp_min(1e-3 * b.numel() ** 0.5)) for a, b in zip(got, want, strict=True)),
        default=0.0,
    )


def journey(g: Generated, folder: Path) -> None:
    """Take the model to integers on every route; raises `Finding`, or what the package raised."""
    model = g.load(folder)
    formats = list(FORMATS)[g.seed % 3]
    want = _run(model, g, 0)
    results: dict[str, list[Tensor]] = {}
    keys: dict[str, set[str]] = {}
    for name, route in ROUTES.items():
        if name == "tracing" and not g.is_traceable:
            continue
        try:
            results[name], keys[name] = _route(route, model, g, formats, want, folder)
        except Exception as error:
            error.add_note(f"by {name}")
            raise
    if len(results) == 2:
        _compare(model, g, formats, want, results)
        # A repeated line may be fused by one route only; wrapped code with `getattr` may call any module of its class.
        is_vague = g.has_repeats or ("@wrap()" in g.text and "getattr(self" in g.text)
        if keys["running"] != keys["tracing"] and not is_vague:
            raise Finding(f"keys differ: {sorted(keys['running'] ^ keys['tracing'])[:6]}")


def _compare(
    model: nn.Module, g: Generated, formats: str, want: list[Tensor], results: dict[str, list[Tensor]]
) -> None:
    """The routes give the same numbers, or near ones where their scales differ.

    Documented: by running the calls of one line share their scales, and tracing does not fuse inside wrapped code.
    """
    running, tracing = results["running"], results["tracing"]
    distance = _distance(tracing, running)
    has_same_scales = not g.has_repeats and "@wrap()" not in g.text
    if has_same_scales and (different := mismatches(running, tracing)):
        raise Finding(f"the routes differ in {different} numbers, distance {distance:.3g}")
    if distance > _allowed(g, formats) and distance > 8 * _moved(model, g, formats, want):
        raise Finding(f"{formats}: the routes are {distance:.3g} apart")


def _allowed(g: Generated, formats: str) -> float:
    """How far from float a format may be; what keeps a given scale of 1/32 is coarse."""
    return max(FORMATS[formats][2], 0.03 if "1 / 32" in g.text else 0.0)


def _moved(model: nn.Module, g: Generated, formats: str, want: list[Tensor]) -> float:
    """How far a float model goes from itself when weights, inputs and results of layers are rounded.

    A norm may enlarge small numbers: what attention over tokens that are alike gives differs by less than a step. What
    reaches a stub with a given scale is rounded to that: a hook on the model may have left the grid of the inputs.
    """
    activation, weight, _ = FORMATS[formats]
    coarse = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in coarse.parameters():
            _round(parameter, weight)
        if "1 / 32" in g.text:
            cast(nn.Module, coarse.quant).register_forward_hook(lambda module, args, out: (out * 32).round() / 32)
        for layer in coarse.modules():
            if type(layer).__module__.startswith("torch.nn."):
                layer.register_forward_hook(lambda module, args, out: _rounded(out, activation))
        inputs = g.inputs(0)
        for x in outputs_of(inputs):
            _round(x, activation)
        return _distance(outputs_of(coarse(*inputs)), want)


def _rounded(tree: Any, dtype: str) -> Any:
    one = lambda x: _round(x.clone(), dtype) if x.is_floating_point() else x  # noqa: E731
    return torch.utils._pytree.tree_map_only(Tensor, one, tree)


def _round(x: Tensor, dtype: str) -> Tensor:
    step = x.abs().max().clamp_min(1e-9) / (127 if dtype == "qint8" else 32767)
    return x.copy_((x / step).round() * step)


def _own_keys(prepared: nn.Module, g: Generated) -> set[str]:
    """The keys of a checkpoint, but for those whose names the routes give, or whose layers only one of them fuses."""
    foreign = _named_by_wrapped_code(g.text)
    return {
        key
        for key in prepared.state_dict()
        if foreign.isdisjoint(parts := key.split("."))
        and not any(part.startswith(("_generated_", "_leaf_")) for part in parts)
    }


def _named_by_wrapped_code(text: str) -> set[str]:
    """Attributes of ``self`` that methods with ``@wrap()`` read."""
    methods = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.decorator_list]
    reads = (node for method in methods for node in ast.walk(method) if isinstance(node, ast.Attribute))
    return {node.attr for node in reads if isinstance(node.value, ast.Name) and node.value.id == "self"}


def _route(
    route: Callable, model: nn.Module, g: Generated, formats: str, want: list[Tensor], folder: Path
) -> tuple[list[Tensor], set[str]]:
    prepared = route(model, g, formats)
    calibrate(prepared, [g.inputs(0)], forward=lambda m, batch: m(*batch), progress=False)
    got = _run(prepared, g, 0)
    distance = _distance(got, want)
    if distance > _allowed(g, formats) and distance > 4 * _moved(model, g, formats, want):
        raise Finding(f"{formats}: {distance:.3g} from float")
    if _distance(_run(model, g, 0), want) > 0:
        raise Finding("the float model was changed")
    quantized = convert(prepared)
    for seed in (0, 1):
        if different := mismatches(_run(prepared, g, seed), _run(quantized, g, seed)):
            raise Finding(f"VALIDATION and converted differ in {different} numbers")
    if g.seed % 4 == 0:
        _through_checkpoint(route, model, prepared, g, formats)
    if g.seed % 4 == 1:
        _train(model, copy.deepcopy(prepared), g)
    if g.seed % 4 == 2:
        _through_onnx(quantized, g, folder)
    return got, _own_keys(prepared, g)


def _through_checkpoint(route: Callable, model: nn.Module, prepared: nn.Module, g: Generated, formats: str) -> None:
    fresh = route(model, g, formats)
    fresh.load_state_dict(prepared.state_dict())
    set_fake_quantize(fresh.eval(), FakeQuantState.VALIDATION)
    if different := mismatches(_run(prepared, g, 1), _run(fresh, g, 1)):
        raise Finding(f"a checkpoint in a fresh model: {different} numbers differ")


def _train(model: nn.Module, prepared: nn.Module, g: Generated) -> None:
    floats = copy.deepcopy(model).train()
    try:
        sum(x.square().mean() for x in outputs_of(floats(*g.inputs(0)))).backward()  # type: ignore[union-attr]
    except RuntimeError:
        return  # a write in place that autograd cannot go back through
    set_fake_quantize(prepared.train(), FakeQuantState.QAT)
    sum(x.square().mean() for x in outputs_of(prepared(*g.inputs(0)))).backward()  # type: ignore[union-attr]
    trained = {name for name, p in prepared.named_parameters() if p.grad is not None}
    expected = {name for name, p in floats.named_parameters() if p.grad is not None and bool(p.grad.any())}
    names = {name for name, _ in prepared.named_parameters()}
    if missing := sorted((expected & names) - trained):
        raise Finding(f"no gradient for {missing[:4]}")
    torch.optim.SGD(prepared.parameters(), 1e-3).step()
    set_fake_quantize(prepared.eval(), FakeQuantState.VALIDATION)
    if different := mismatches(_run(prepared, g, 1), _run(convert(prepared), g, 1)):
        raise Finding(f"after training VALIDATION and converted differ in {different} numbers")


def _through_onnx(quantized: nn.Module, g: Generated, folder: Path) -> None:
    if any(isinstance(x, str) for x in torch.utils._pytree.tree_leaves(g.inputs(0))):
        return  # a file has no place for a string
    file = export_quantized_onnx(quantized, g.inputs(0), folder / "client.onnx")
    for optimization in ("off", "on"):
        found = run_onnx(file, outputs_of(g.inputs(1)), optimization)
        if different := mismatches(_run(quantized, g, 1), found):
            raise Finding(f"converted and ONNX Runtime, {optimization}: {different} numbers differ")


def outcome(seed: int, folder: Path) -> tuple[str, str, str]:
    """What became of a seed: "ok", "refused" or "bad"; a line that says it, and the traceback."""
    g = write(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            journey(g, folder)
    except Exception as error:
        kind = "refused" if isinstance(error, (HorizonError, NotImplementedError)) else "bad"
        notes = " ".join(getattr(error, "__notes__", []))
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} ({notes})"
        return kind, text, traceback.format_exc()
    return "ok", "", ""
