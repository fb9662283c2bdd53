"""The modules that torch tests its own quantization with, built with small inputs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.ao says that it is leaving
    from torch.testing._internal import common_quantization as theirs

from horizon_plugin_pytorch.quantization import DeQuantStub, QuantStub

Built = tuple[nn.Module, tuple]

# Classes that nobody would quantize, and why.
NOT_MODELS = {
    "DummyObserver": "an observer of torch.ao, not a model",
    "ControlFlow": "`control_flow.cond` and `map` decide by values at run time; no chip has such an operator",
}


def classes() -> dict[str, type[nn.Module]]:
    """Every class of modules in the file, by name; those of `TestHelperModules` with a prefix."""

    def of(owner: Any) -> list[tuple[str, type[nn.Module]]]:
        found = [x for x in vars(owner).items() if inspect.isclass(x[1]) and issubclass(x[1], nn.Module)]
        return [(name, cls) for name, cls in found if cls.__module__ == theirs.__name__ and name not in NOT_MODELS]

    return dict(of(theirs)) | {f"helper_{name}": cls for name, cls in of(theirs.TestHelperModules)}


class Stubs(nn.Module):
    """Our stubs around a model that has none, for every float argument and every output; fx can trace it.

    Args:
        has_own: the model has QuantStubs of its own, and only what it leaves quantized is closed.
    """

    def __init__(self, model: nn.Module, inputs: tuple, has_own: bool) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten(inputs)
        self.model = model
        self.is_nested = len(leaves) != len(inputs)
        self.quant = nn.ModuleList(
            QuantStub() if x.is_floating_point() and not has_own else nn.Identity() for x in leaves
        )
        self.dequant = DeQuantStub()
        with torch.no_grad():
            self.paths = [path for path, _ in pytree.tree_flatten_with_path(model.eval()(*inputs))[0]]

    def forward(self, a: Any, b: Any = None, c: Any = None, d: Any = None) -> list[Tensor]:
        args = pytree.tree_leaves((a, b, c, d)) if self.is_nested else (a, b, c, d)
        leaves = [quant(x) for quant, x in zip(self.quant, args, strict=False)]
        out = self.model(*pytree.tree_unflatten(leaves, self.spec))
        return [self.dequant(pytree.key_get(out, path)) for path in self.paths]


def _vector(*shape: int) -> Callable[[], tuple]:
    return lambda: (torch.randn(*shape),)


def _bags() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 10, (12,)), torch.tensor([0, 5])


# Inputs of classes that do not bring their own.
INPUTS: dict[str, Callable[[], tuple]] = {
    "RNNDynamicModel": _vector(3, 2, 2),
    "RNNCellDynamicModel": _vector(3, 2),
    "LSTMwithHiddenDynamicModel": lambda: (torch.randn(3, 2, 2), (torch.randn(1, 2, 2), torch.randn(1, 2, 2))),
    "ActivationsTestModel": _vector(4, 5),
    "NormalizationTestModel": _vector(4, 5),
    "NestedModel": _vector(4, 5),
    "AnnotatedNestedModel": _vector(4, 5),
    "AnnotatedSubNestedModel": _vector(4, 5),
    "AnnotatedCustomConfigNestedModel": _vector(4, 5),
    "QuantSubModel": _vector(4, 5),
    "InnerModule": _vector(4, 5),
    "SkipQuantModel": _vector(4, 5),
    "AnnotatedSkipQuantModel": _vector(4, 5),
    "QuantStubModel": _vector(4, 5),
    "ManualLinearQATModel": _vector(4, 5),
    "ManualDropoutQATModel": _vector(16, 5),
    "ManualLinearDynamicQATModel": _vector(4, 5),
    "ManualConvLinearQATModel": _vector(4, 3, 10, 10),
    "ManualConvLinearSymmQATModel": _vector(4, 3, 10, 10),
    "ManualEmbeddingBagLinear": _bags,
    "DeFusedEmbeddingBagLinear": lambda: (torch.randint(0, 10, (4, 3)),),
    "SubModelForFusion": _vector(2, 2, 4, 4),
    "SubModelWithoutFusion": _vector(2, 2, 4, 4),
    "ModelForFusion": _vector(36, 3, 1, 37),
    "ConvBNReLU": _vector(2, 3, 4, 4),
    "ModelWithSequentialFusion": _vector(2, 3, 10, 10),
    "ModelForFusionWithBias": _vector(2, 3, 8, 8),
    "ModelForLinearBNFusion": _vector(4, 20),
    "ModelForConvTransposeBNFusion": _vector(2, 3, 4),
    "ModelWithFunctionals": _vector(2, 3),
    "ResNetBase": _vector(2, 3, 4, 4),
    "ModelMultipleOps": _vector(2, 3, 8, 8),
    "ModelMultipleOpsNoAvgPool": _vector(2, 3, 16, 16),
    "EmbeddingBagModule": lambda: (torch.randint(0, 10, (12,)), torch.tensor([0, 5, 12]), torch.rand(12)),
    "EmbeddingModule": lambda: (torch.randint(0, 10, (2, 3)),),
    "EmbeddingWithStaticLinear": lambda: (*_bags(), torch.randn(2, 4)),
    "DenseTopMLP": lambda: (torch.randn(2, 5), torch.randn(2, 4)),
    "EmbBagWrapper": _bags,
    "SparseNNModel": lambda: (*_bags(), torch.randn(2, 4)),
    "helper_Conv2dPropAnnotaton": _vector(2, 3, 5, 5),
    "helper_Conv2dWithObsSharingOps": _vector(2, 3, 5, 5),
    "helper_Conv2dWithTwoLinearPermute": _vector(2, 3, 5, 5),
    "helper_Conv2dWithTwoLinear": _vector(2, 3, 4, 4),
    "helper_ConvLinearWPermute": _vector(2, 3, 5, 5),
    "helper_ConvMaxPool2d": _vector(2, 2, 5, 5),
    "helper_ConvWithAdaptiveAvgPool2d": _vector(2, 3, 5, 5),
    "helper_ConvWithBNRelu": _vector(2, 3, 5, 5),
    "helper_ConvTWithBNRelu": _vector(2, 3, 5, 5),
    "helper_Conv2dWithCat": lambda: (torch.randn(2, 3, 5, 5), torch.randn(2, 3, 5, 5)),
    "helper_Conv2dWithTwoCat": lambda: (
        torch.randn(2, 3, 5, 5),
        torch.randn(2, 3, 5, 5),
        torch.randn(2, 6, 3, 3),
        torch.randn(2, 6, 3, 3),
    ),
    "helper_ThreeAdd": lambda: tuple(torch.randn(2, 3) for _ in range(4)),
    "helper_EmbeddingModule": lambda: (torch.randint(0, 10, (2, 3)),),
    "helper_EmbeddingConvLinearModule": lambda: (torch.randint(0, 10, (2, 5)),),
    "helper_AddInplaceAdd": lambda: (torch.randn(2, 3), torch.randn(2, 3)),
    "helper_MulInplaceMul": lambda: (torch.randn(2, 3), torch.randn(2, 3)),
    "helper_AddMulScalar": _vector(2, 3),
    "helper_ConvBnReLU2dAndLinearReLU": _vector(2, 3, 5, 5),
    "helper_LinearReluModel": _vector(4, 5),
}

# Constructor arguments; a class with several entries is built in several ways.
ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "RNNDynamicModel": {kind: {"mod_type": kind} for kind in ("GRU", "LSTM")},
    "RNNCellDynamicModel": {kind: {"mod_type": kind} for kind in ("GRUCell", "LSTMCell", "RNNReLU", "RNNTanh")},
    "LinearBnLeakyReluModel": {"bn": {}, "plain": {"with_bn": False}},
    "ConvBnAddReluModel": {
        "bn": {},
        "plain": {"with_bn": False, "with_relu": False},
        "operator": {"use_torch_add": False},
        "one_conv": {"two_conv": False},
        "right": {"two_conv": False, "left_conv": False},
    },
    "ModelForFusion": {"": {"qconfig": theirs.default_qconfig}},
    "DenseTopMLP": {"": dict(dense_dim=4, dense_out=2, embedding_dim=5, top_out_in=2, top_out_out=2)},
    "EmbBagWrapper": {"": dict(num_embeddings=10, embedding_dim=5)},
    "helper_ConvWithBNRelu": {
        f"{dim}d{'_relu' if relu else ''}": {"relu": relu, "dim": dim} for dim in (1, 2, 3) for relu in (True, False)
    },
    "helper_ConvTWithBNRelu": {f"{dim}d": {"relu": True, "dim": dim} for dim in (1, 2)},
}


def _ways() -> dict[str, tuple[str, dict[str, Any]]]:
    """What is built: a class's name, and `-` and a way to build it where there are several."""
    ways = {}
    for name, cls in classes().items():
        known = {"qengine": "fbgemm"} if "qengine" in inspect.signature(cls).parameters else {}
        for way, arguments in ARGUMENTS.get(name, {"": {}}).items():
            ways[f"{name}-{way}" if way else name] = (name, known | arguments)
    return ways


MODULES = _ways()


def has_stubs(model: nn.Module) -> bool:
    """Did the model's author put a QuantStub, ours or torch's, into it?"""
    return any(type(m).__name__ == "QuantStub" for m in model.modules())


def bare(name: str) -> Built:
    """A module as torch's tests have it, with its qconfigs of torch.ao, and inputs."""
    # The mean of everything is one number, which the next run may put just above the range: not with this seed.
    torch.manual_seed(3)
    cls_name, arguments = MODULES[name]
    model: Any = classes()[cls_name](**arguments)
    find = getattr(model, "get_example_inputs", None) or getattr(model, "example_inputs", None)
    inputs = find() if find is not None else INPUTS[cls_name]()
    if "ConvWithBNRelu" in cls_name or "ConvTWithBNRelu" in cls_name:
        inputs = (torch.randn(2, 3, *[5] * arguments["dim"]),)
    # One number per channel has no deviation, which batch normalisation asks for.
    return model, tuple(
        torch.cat([x, torch.randn_like(x)]) if isinstance(x, Tensor) and x.shape[0] == 1 and x.dim() == 2 else x
        for x in inputs
    )


def build(name: str) -> Built:
    """A module with our stubs around it where it has none, without its qconfigs of torch.ao, and inputs."""
    model, inputs = bare(name)
    for module in model.modules():
        if module.__dict__.get("qconfig") is not None:
            del module.qconfig
    return Stubs(model, inputs, has_stubs(model)).eval(), inputs
