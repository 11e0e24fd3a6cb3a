"""Training in several processes: what accelerate does not provide."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def broadcast_object(value: T) -> T:
    """Returns the first process' value in all processes."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def largest(value: int, device: torch.device) -> int:
    """Returns the largest of the processes' values in all processes."""
    if not torch.distributed.is_initialized():
        return value
    values = torch.tensor([value], device=device)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return int(values.item())


class _SyncedBatchNorm(nn.BatchNorm2d):
    """Batch normalisation over the batches of all processes, on any device, for features of any rank.

    torch's own supports GPUs only. In training, output and gradient equal those of one process with the whole
    batch, up to rounding.
    """

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        shape = (1, -1, *(1,) * (x.dim() - 2))
        if not self.training:
            mean, var = self.running_mean, self.running_var
        else:
            mean = _mean(x, shape)
            var = _mean((x - mean.view(shape)).square(), shape)
            count = _processes() * x.numel() // x.shape[1]
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked.add_(1)
                momentum = 0.0 if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(var * (count / max(1, count - 1)), momentum)
        a = self.weight * torch.rsqrt(var + self.eps)
        b = self.bias - mean * a
        return (x * a.view(shape) + b.view(shape)).to(x.dtype)


def _mean(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mean over all axes but the channels, and over the processes, which have equally many images."""
    from torch.distributed.nn.functional import all_reduce

    dtype = torch.promote_types(x.dtype, torch.float32)  # half precision is too coarse for such sums
    own = x.mean([d for d, size in enumerate(shape) if size == 1], dtype=dtype)
    return all_reduce(own) / _processes()


def _processes() -> int:
    return torch.distributed.get_world_size()


def sync_batch_norm(model: nn.Module) -> None:
    """Makes every batch norm of a model compute its statistics over all processes, in place. Parameters and
    buffers keep their names."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.__class__ = _SyncedBatchNorm
