"""The fused operators under torch's transforms: torch.func, forward-mode derivatives, batches of gradients.

Their backward pass is an operator too, and has no derivative of its own. torch does not say so by itself: it
takes a tangent that meets an operator without a rule for zero. So calls under forward-mode differentiation
or a derivative of torch.func are refused, which leaves them to the eager backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree


def differentiated_forwards(tensors: Iterable[Tensor]) -> bool:
    """Whether one of the tensors has a tangent."""
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


@torch.compiler.assume_constant_result  # torch.compile guards on the transforms that it traces under
def inside_func_derivative() -> bool:
    """Whether a derivative of torch.func is being taken: grad, vjp, jvp, jacobians, hessian, linearize."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    derivatives = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
    return any(interpreter.key() in derivatives for interpreter in stack)


def refuse_second_derivative(*_: Any) -> NoReturn:
    raise RuntimeError("the fused kernels have no second derivative: choose backend='eager' for it")


def check_gradient(grad: Tensor) -> None:
    """Refuses gradients that the backward pass would get wrong: with a tangent, or many in one."""
    if differentiated_forwards([grad]) or inside_func_derivative():
        refuse_second_derivative()
    if torch._C._functorch.is_legacy_batchedtensor(grad):
        raise RuntimeError(
            "the fused kernels take no batches of gradients (is_grads_batched, vectorize): "
            "choose backend='eager' for them"
        )


def register_vmap(operator: Any) -> None:
    """vmap as a loop: each call of a kernel uses all threads anyway."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        leaves, structure = pytree.tree_flatten(args)
        dims = pytree.tree_flatten(in_dims, is_leaf=lambda dim: dim is None)[0]
        results = [
            operator(
                *pytree.tree_unflatten(
                    [
                        leaf if dim is None else leaf.select(dim, i)
                        for leaf, dim in zip(leaves, dims, strict=True)
                    ],
                    structure,
                )
            )
            for i in range(info.batch_size)
        ]
        stacked = pytree.tree_map(lambda *each: torch.stack(each), *results)
        return stacked, pytree.tree_map(lambda _: 0, stacked)

    operator.register_vmap(rule)
