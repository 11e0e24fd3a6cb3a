"""Counts the parameters and FLOPs of a network."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from selfconv.nn import (
    AffineConv2d,
    DepthwiseConv2d,
    GroupConv2d,
    LiftingConv2d,
    LocalAttention2d,
)
from selfconv.ops import affine_self_conv_flops, split_packed


def count_parameters(model: nn.Module) -> int:
    """The number of learned parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_flops(model: nn.Module, input_shape: Sequence[int]) -> int:
    """Floating-point operations of a forward pass for one image, a multiply-add counted as two.

    Convolutions and matrix products are counted by torch, those of its recurrent layers by a formula here.
    Affine self convolution has its own formula, since torch does not count all of it; the result is the same
    for every backend and device. Work that is done once for all images, the computation of filters from
    coefficients, is not counted. A copy of the model runs on the model's device; on the ``"meta"`` device
    nothing is computed.

    Args:
        input_shape: of an image, such as ``(3, 32, 32)``.
    """
    model = copy.deepcopy(model).eval()
    counter = _FlopCounter()

    def before(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        counter.layers_that_make_filters += 1

    def after(layer: nn.Module, inputs: tuple[Tensor], named: dict[str, Any], output: Any) -> None:
        counter.layers_that_make_filters -= 1
        if isinstance(layer, LocalAttention2d):
            counter.total += operation_flops(layer, (inputs[0] if inputs else named["x"]).shape)

    def attend(layer: LocalAttention2d, packed: Tensor) -> Tensor:
        """Values of the right shape in place of the operation, whose FLOPs are counted by formula."""
        if not counter.layers_that_make_filters:  # called by another module: ``after`` is not
            counter.total += operation_flops(layer, packed.shape)
        values = split_packed(packed, layer.packed_channels)[2]
        lifted = len(layer.domain) < len(layer.group)
        return values.unsqueeze(2).expand(-1, -1, len(layer.group), -1, -1) if lifted else values

    for layer in model.modules():
        if isinstance(layer, MAKES_FILTERS):
            layer.register_forward_pre_hook(before)
            layer.register_forward_hook(after, with_kwargs=True)
        if isinstance(layer, LocalAttention2d):
            layer.attend = partial(attend, layer)  # type: ignore[method-assign]
    try:
        with counter, _transformers_in_parts():
            run_on_zeros(model, input_shape)
    except NotImplementedError as error:
        if "HigherOrderOperator" not in str(error):
            raise
        raise NotImplementedError(
            "count_flops: expected a network without torch's control flow, such as torch.cond, because FLOPs "
            "depend on the branch"
        ) from error
    return counter.total


MAKES_FILTERS = (LocalAttention2d, LiftingConv2d, GroupConv2d, DepthwiseConv2d, AffineConv2d)


class _FlopCounter(TorchDispatchMode):
    """Adds up torch's formulas; in layers that make filters, those of the convolutions alone.

    torch's own ``FlopCounterMode`` loads torch's compiler, which takes as long as loading torch.
    """

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # imports triton if it is installed

        aten = torch.ops.aten
        attention = flop_registry[aten._scaled_dot_product_flash_attention]
        self.formulas = flop_registry | {
            aten._scaled_dot_product_flash_attention_for_cpu: attention,
            aten.mkldnn_rnn_layer: lambda x, *weights, **_: _recurrent_flops(x, weights[:2]),
            aten._cudnn_rnn: lambda x, weights, *_, **__: _recurrent_flops(x, weights),
            aten.miopen_rnn: lambda x, weights, *_, **__: _recurrent_flops(x, weights),
        }
        self.total = 0
        self.layers_that_make_filters = 0  # around the current call

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what skips the compiler would load it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = self.formulas.get(func.overloadpacket)
        if formula is None:
            with self:  # torch has formulas of what the operation consists of
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        counted = not self.layers_that_make_filters or func.overloadpacket is torch.ops.aten.convolution
        if formula and counted:
            self.total += formula(*args, **kwargs, out_val=out)
        return out


def _recurrent_flops(x: Tensor, weights: Sequence[Tensor]) -> int:
    """Of an operator that computes a recurrent layer, or several: a product with each matrix in each step."""
    steps = x.numel() // x.shape[-1]
    return sum(2 * steps * weight.numel() for weight in weights if weight.ndim == 2)


@contextmanager
def _transformers_in_parts() -> Iterator[None]:
    """Makes torch's attention and encoder layers call operators that have formulas."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@torch.no_grad()
def run_on_zeros(model: nn.Module, input_shape: Sequence[int]) -> None:
    """Calls the model on an image of zeros, for what can be seen on the way."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about results, which nobody looks at
        model(torch.zeros(1, *input_shape, device=like.device, dtype=like.dtype))


def operation_flops(layer: LocalAttention2d, input_shape: Sequence[int]) -> int:
    """Those of the operation inside an attention layer, without its 1×1 maps."""
    n, _, *rest = input_shape
    if len(layer.domain) < len(layer.group):  # lifted: a centre for each element
        rest = [len(layer.group), *rest]
    query, value = (n, layer.key_channels, *rest), (n, layer.out_channels, *rest)
    affine = [None if t is None else t.shape for t in layer.affine_parameters()]
    return affine_self_conv_flops(query, query, value, *affine, kernel_size=layer.window.size)
