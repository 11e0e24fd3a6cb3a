"""One checked call of the operation: what the public function hands to a backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from selfconv._arguments import describe_value, is_number, is_whole, of_python
from selfconv.groups import Group, get_group
from selfconv.ops._window import Pair, Window, make_window

Features = tuple[Tensor, Tensor, Tensor]  # query, key, value
Filters = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # ψ^K, β^K, ψ^V, β^V


@dataclass(frozen=True)
class Call:
    """Arguments of ``affine_self_conv`` after all checks, with a group axis on every group, z2 too.

    ψ is ``[C, R, k, k]``, or ``[C, C, R, k, k]`` if it maps channel to channel; None where the
    features pass unfiltered. β is ``[C, k, k]``; None where nothing is added.
    """

    query: Tensor  # [N, C_k, |H|, h, w]
    key: Tensor  # [N, C_k, R, h, w], R = 1 if the call lifts, else |H|
    value: Tensor  # [N, C_v, R, h, w]
    psi_k: Tensor | None
    beta_k: Tensor | None
    psi_v: Tensor | None
    beta_v: Tensor | None
    window: Window
    num_heads: int
    scale: float
    group: Group
    lifting: bool = False  # from the plane: every P has the same query, and key and value have one plane
    packed: Tensor | None = None  # one tensor of which query, key and value are slices, in that order

    @property
    def tensors(self) -> list[Tensor]:
        given = (self.query, self.key, self.value, self.psi_k, self.beta_k, self.psi_v, self.beta_v)
        return [t for t in given if t is not None]

    @property
    def dense(self) -> bool:
        return any(psi is not None and psi.dim() == 5 for psi in (self.psi_k, self.psi_v))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Half precision is computed in float32: a softmax over a window of products needs it."""
        given = {t.dtype for t in self.tensors} - {torch.float32}
        return reduce(torch.promote_types, given, torch.float32)

    def steered(self, psi: Tensor | None, beta: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """ψ and β transformed by every element P of the group: [C, (C,) P, R, k, k] and [C, P, k, k]."""
        dtype = self.compute_dtype
        return (
            None if psi is None else steer(cast(psi, dtype), self.group, self.lifting),
            None if beta is None else self.group.steer(cast(beta, dtype), planar=True),
        )


def steer(psi: Tensor, group: Group, lifting: bool) -> Tensor:
    """ψ [..., R, k, k] transformed by every element P of the group: [..., P, R, k, k]; R = 1 if it lifts."""
    return group.steer(psi.squeeze(-3), planar=True).unsqueeze(-3) if lifting else group.steer(psi)


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, but without an operator in exported programs if t has this dtype."""
    return t if t.dtype == dtype else t.to(dtype)


def owned(t: Tensor) -> Tensor:
    """A 4-D view as it is; while torch.compile traces training, a copy.

    Inductor fails on 4-D views that it keeps for the backward pass, as convolutions and norms need them, once
    image sizes are symbols: it cannot sort their strides. The copy is written in the order that its
    convolutions take. It is a sum of one term because Inductor removes ``clone``.
    """
    tracing = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return t.unsqueeze(0).sum(0) if tracing and torch.is_grad_enabled() else t


def check_call(
    features: Features,
    filters: Filters,
    *,
    kernel_size: int | Pair | None,
    num_heads: int,
    scale: float | None,
    group: str | Group,
    dilation: int | Pair = 1,
    padding_mode: str = "zeros",
    lifting: bool = False,
) -> Call:
    """Checks all arguments; each error restates what was given."""
    group = get_group(group)
    (query, key, value), (psi_k, beta_k, psi_v, beta_v) = features, filters
    named_features = {"query": query, "key": key, "value": value}
    named_filters = {"psi_k": psi_k, "beta_k": beta_k, "psi_v": psi_v, "beta_v": beta_v}
    given = named_features | {name: t for name, t in named_filters.items() if t is not None}
    for name, t in given.items():
        check_float(name, t)
    devices = {str(t.device) for t in given.values()}
    if len(devices) > 1:
        placed = ", ".join(f"{name} on {t.device}" for name, t in given.items())
        raise ValueError(f"expected all tensors on one device; got {placed}")

    planar = lifting or len(group) == 1
    layout = "[N, C, h, w]" if planar else f"[N, C, {len(group)}, h, w]"
    where = f"to be lifted to group {group.name!r}" if lifting else f"on group {group.name!r}"
    for name, t in named_features.items():
        if t.dim() != (4 if planar else 5) or not (planar or t.shape[2] == len(group)):
            raise ValueError(f"{name}: expected {layout} {where}; got shape {list(t.shape)}")
    if query.shape != key.shape or key.shape[0] != value.shape[0] or key.shape[2:] != value.shape[2:]:
        raise ValueError(
            "query and key must have one shape, and value may differ from it in channels alone; "
            + shapes(named_features)
        )

    c_k, c_v = int(key.shape[1]), int(value.shape[1])  # torch.jit.trace makes tensors of sizes
    if min(c_k, c_v) < 1:
        raise ValueError(f"expected one channel or more; got {shapes(named_features)}")
    sizes = {(int(f.shape[-2]), int(f.shape[-1])) for f in filters if f is not None and f.dim() > 1}
    window = None if kernel_size is None else make_window(kernel_size, dilation, padding_mode, group)
    sizes |= set() if window is None else {window.size}
    if len(sizes) != 1:
        expected = (
            "one window size among psi and beta" if sizes else "kernel_size, as psi and beta are all None"
        )
        raise ValueError(f"expected {expected}; got {shapes(named_filters)}, kernel_size={kernel_size}")
    window = window or make_window(sizes.pop(), dilation, padding_mode, group)
    axis = () if planar else (len(group),)
    for suffix, c, psi, beta in (("k", c_k, psi_k, beta_k), ("v", c_v, psi_v, beta_v)):
        one, dense = (c, *axis, *window.size), (c, c, *axis, *window.size)
        if psi is not None and tuple(psi.shape) not in (one, dense):
            raise ValueError(
                f"psi_{suffix}: expected {list(one)}, or {list(dense)} to map channel to channel, "
                f"for {c} channels {where}; got {list(psi.shape)}"
            )
        if beta is not None and tuple(beta.shape) != (c, *window.size):
            expected_beta = [c, *window.size]
            raise ValueError(
                f"beta_{suffix}: expected {expected_beta} for {c} channels; got {list(beta.shape)}"
            )
    check_heads(num_heads, key=c_k, value=c_v)

    if planar:
        query, key, value = query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
        query = query.expand(-1, -1, len(group), -1, -1) if lifting else query
        psi_k = None if psi_k is None else psi_k.unsqueeze(-3)
        psi_v = None if psi_v is None else psi_v.unsqueeze(-3)
    return Call(
        query,
        key,
        value,
        psi_k,
        beta_k,
        psi_v,
        beta_v,
        window=window,
        num_heads=num_heads,
        scale=check_scale(scale, c_k),
        group=group,
        lifting=lifting and len(group) > 1,
    )


def check_float(name: str, t: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a tensor; got {type(t).__name__}")
    if not t.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor; got {t.dtype} of shape {list(t.shape)}")


def check_scale(scale: float | None, key_channels: int, module: str = "") -> float:
    """The factor of the score: by default 1 / key channels. Errors begin with the name of the ``module``."""
    if scale is None:
        return 1 / key_channels
    where = f"{module}: " if module else ""
    if isinstance(scale, Tensor):  # the kernels take a number: no gradient would reach it
        raise ValueError(
            f"{where}scale: expected a number, which is not trained; got a tensor of shape "
            f"{list(scale.shape)}, of which scale.item() is the number"
        )
    if torch.compiler.is_compiling():  # to which it may be a symbol
        return float(scale)
    if not is_number(scale) or not math.isfinite(scale):
        raise ValueError(f"{where}scale: expected a finite number; got {describe_value(scale)}")
    return float(scale)


def check_probability(name: str, p: float) -> float:
    """Raises an error, which begins with ``name``, unless p is a number from 0 to 1; returns it."""
    if not is_number(p) or not 0 <= p <= 1:
        raise ValueError(f"{name}: expected a probability, 0 to 1; got {describe_value(p)}")
    return of_python(p)


def check_heads(num_heads: int, module: str = "", **channels: int) -> None:
    """Raises an error, which begins with the name of the ``module``, unless heads split all these channels
    into equal runs."""
    where = f"{module}: " if module else ""
    if not is_whole(num_heads):
        raise TypeError(f"{where}num_heads: expected an integer ≥ 1; got {describe_value(num_heads)}")
    if num_heads < 1:
        raise ValueError(f"{where}num_heads: expected an integer ≥ 1; got {num_heads}")
    if any(c % num_heads for c in channels.values()):
        counts = ", ".join(f"{c} {name} channels" for name, c in channels.items())
        common = math.gcd(*channels.values())
        divisors = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ValueError(f"{where}num_heads={num_heads} does not divide {counts}; expected one of {divisors}")


def shapes(tensors: Mapping[str, Tensor | None]) -> str:
    return ", ".join(
        f"{name} {None if t is None else list(map(int, t.shape))}" for name, t in tensors.items()
    )
