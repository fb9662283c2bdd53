"""Group, instance and root-mean-square norms, under the names that the guides use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm`, under the name that the guides use.

    >>> GroupNorm(2, 8)(torch.randn(2, 8, 4, 4)).shape
    torch.Size([2, 8, 4, 4])
    """


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, under the name that the guides use.

    >>> RMSNorm(8)(torch.randn(2, 8)).shape
    torch.Size([2, 8])
    """


class InstanceNorm(nn.Module):
    """`torch.nn.functional.instance_norm` as a module, for tensors of any number of axes.

    Args:
        weight, bias: one number for each channel, or None.
        running_mean, running_var: statistics to use instead of the input's own.
        eps: as in torch.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.eps = eps
        tensors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
        for name, value in tensors.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        has_statistics = self.running_mean is not None
        return F.instance_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, not has_statistics, 0.0, self.eps
        )


class ChannelScale2d(nn.Module):
    """Each channel of an image times a number that is learnt.

    Args:
        num_features: the number of channels.

    >>> ChannelScale2d(3)(torch.ones(1, 3, 2, 2)).sum()
    tensor(12., grad_fn=<SumBackward0>)
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.weight = nn.Parameter(torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.reshape(-1, 1, 1)

    def extra_repr(self) -> str:
        return str(self.num_features)
