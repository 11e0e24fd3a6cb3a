"""What every self-convolution layer of a model computed for one image, pixel by pixel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from selfconv.groups import Group
from selfconv.nn import LocalAttention2d, relative_entropy
from selfconv.ops import Window, pad, steer
from selfconv.visualize._explanation import activation_of
from selfconv.visualize._trace import trace

Pixel = tuple[int, int]  # row, column


class LayerInfo(NamedTuple):
    """A self-convolution layer and the size of its attention map (with a stride, before pooling)."""

    name: str
    layer: LocalAttention2d
    size: tuple[int, int]  # h, w


@dataclass(frozen=True)
class PixelView:
    """How one head computes its output at one pixel x: Eq. 11, on a group Eq. 20, for every plane P.

        output(P) = Σ_y α(P, y) · (Σ_R ψ(P, R, y) · neighbourhood(R, y) + β(P, y))
                  = Σ_(R,y) effective(P, R, y) · neighbourhood(R, y) + Σ_y positional(P, y)

    y runs over the k×k window around x. ψ and β are transformed by P. On z2 there is one plane. A layer
    without ψ (SASA) is shown with the identity as ψ, and a layer without β with β = 0. A dense ψ has one more
    axis, for its input channels, which are all D channels of the layer.
    """

    layer: str
    head: int
    pixel: Pixel
    size: tuple[int, int]  # of the layer's map
    group: Group
    neighbourhood: Tensor  # [R, C, k, k], the head's values V; dense: [R, D, k, k]
    psi: Tensor  # [P, R, C, k, k]; dense: [P, R, C, D, k, k]
    beta: Tensor  # [P, C, k, k]
    scores: Tensor  # [P, k, k], before the softmax
    alpha: Tensor  # [P, k, k], sums to 1 on every plane
    effective: Tensor  # α·ψ, shaped as psi
    positional: Tensor  # α·β, [P, C, k, k]
    output: Tensor  # [P, C], what the layer computed, before its output map W^O
    window: tuple[int, int, int, int]  # top, left, bottom, right of the window in pixels of the image
    crop: Tensor  # [image channels, bottom - top, right - left], the image there; NaN outside of it

    @property
    def dense(self) -> bool:
        return self.psi.dim() == 6

    def response(self) -> Tensor:
        """The right side of the equation, [P, C]: equal to ``output`` up to rounding."""
        seen = self.neighbourhood[:, None] if self.dense else self.neighbourhood
        summed = (1, 3, 4, 5) if self.dense else (1, 3, 4)
        return (self.effective * seen).sum(summed) + self.positional.sum((2, 3))


def strengths(view: PixelView) -> Tensor:
    """How large the effective filter of each channel of the head is: the sum of its magnitudes, [C]."""
    return view.effective.abs().transpose(0, 2).flatten(1).sum(1)


class LayerFilters(NamedTuple):
    """The affine parameters of a layer; a missing ψ is the identity, and a missing β is 0."""

    psi_k: Tensor  # [C, |H|, k, k]; dense: [C, C, |H|, k, k]
    beta_k: Tensor  # [C, k, k]
    psi_v: Tensor
    beta_v: Tensor


@dataclass(frozen=True)
class _Operation:
    """One layer's call of the operation with everything that a pixel's view is cut from."""

    query: Tensor  # [C, P, h, w]
    key: Tensor  # [C, R, h, w]
    value: Tensor
    output: Tensor  # [C, P, h, w]
    alpha: Tensor  # [heads, P, k, k, h, w]
    filters: LayerFilters  # steered: ψ [C, P, R, k, k], dense [C, C, P, R, k, k], β [C, P, k, k]


class Inspection:
    """Runs a model on one image once, and then computes views of any layer and pixel.

    Attributes:
        image: ``[C, h, w]``, the model's input.
        output: of the model, ``[num_classes]``.
        maps: the output of every spatial layer (including convolutions wider than 1×1), by name in forward
            order: ``[C, h, w]``, or ``[C, |H|, h, w]`` on a group.
        layers: the self-convolution layers, in forward order.
    """

    def __init__(self, model: nn.Module, image: Tensor) -> None:
        run = trace(model, image)
        self.image, self.output = run.image[0], run.output[0]
        self.maps = {name: features[0] for name, features in run.maps.items()}
        self.layers: list[LayerInfo] = []
        for name in run.inputs:
            layer = model.get_submodule(name)
            if isinstance(layer, LocalAttention2d):
                h, w = run.inputs[name].shape[-2:]
                self.layers.append(LayerInfo(name, layer, (h, w)))
        self._inputs, self._features, self._model = run.inputs, run.features, model
        self._operations: dict[str, _Operation] = {}

    def layer(self, name: str) -> LayerInfo:
        """The layer of that name."""
        found = next((info for info in self.layers if info.name == name), None)
        if found is None:
            names = ", ".join(info.name for info in self.layers)
            expected = f"expected one of {names}" if names else "this model has no self-convolution layer"
            raise ValueError(f"layer: {expected}; got {name!r}")
        return found

    def to_map(self, layer: str, pixel: Pixel) -> Pixel:
        """The pixel of a layer's map that contains a pixel of the image."""
        (h, w), (image_h, image_w) = self.layer(layer).size, self.image.shape[-2:]
        row, column = _check_pixel(pixel, (image_h, image_w), "image")
        return row * h // image_h, column * w // image_w

    def look(self, layer: str, pixel: Pixel, head: int) -> PixelView:
        """How a head of a layer computes its output at a pixel of the layer's map."""
        info = self.layer(layer)
        check_head(info, head)
        return self._view(info, _check_pixel(pixel, info.size, f"map of {layer}"), head)

    def look_all(self, layer: str, pixel: Pixel) -> list[PixelView]:
        """``look`` for every head."""
        info = self.layer(layer)
        pixel = _check_pixel(pixel, info.size, f"map of {layer}")
        return [self._view(info, pixel, head) for head in range(info.layer.num_heads)]

    def alpha(self, layer: str) -> Tensor:
        """α at every pixel: ``[heads, P, k, k, h, w]``."""
        return self._operation(self.layer(layer)).alpha

    def entropy(self, layer: str) -> Tensor:
        """The relative entropy of attention at every pixel, ``[heads, P, h, w]``.

        −Σ_y α log α divided by its maximum, log k²: 0 where attention is on one neighbour only, 1 where it is
        uniform over the window.
        """
        return relative_entropy(self.alpha(layer).flatten(2, 3), 2)

    def class_activation_maps(self) -> Tensor:
        """What each place adds to each logit, ``[num_classes, h, w]``; see ``class_activation_maps``."""
        return activation_of(self._model, self._features)

    @torch.no_grad()
    def _operation(self, info: LayerInfo) -> _Operation:
        if info.name not in self._operations:
            layer = info.layer
            features = layer.query_key_value(self._inputs[info.name])
            output, alpha = layer.attend_with_weights(*features)
            # with the axis of the group, as everywhere here
            query, key, value = (t[0].unsqueeze(1) if len(layer.domain) == 1 else t[0] for t in features)
            query = query.expand(-1, len(layer.group), -1, -1)  # of a planar layer, one for every P
            output, alpha = (t[0].unsqueeze(1) if len(layer.group) == 1 else t[0] for t in (output, alpha))
            filters = _steered_filters(layer)
            self._operations[info.name] = _Operation(query, key, value, output, alpha, filters)
        return self._operations[info.name]

    @torch.no_grad()
    def _view(self, info: LayerInfo, pixel: Pixel, head: int) -> PixelView:
        op, window, heads = self._operation(info), info.layer.window, info.layer.num_heads
        i, j = pixel
        alpha = op.alpha[head, ..., i, j]  # [P, k, k]
        keys, values = (_neighbours(f, pixel, window) for f in (op.key, op.value))  # [C, R, k, k]
        of_key, of_value = (_channels_of(head, heads, len(f)) for f in (keys, values))
        a_k = _affine_map(keys, op.filters.psi_k, op.filters.beta_k)[of_key]  # [C, P, k, k]
        query = op.query[of_key, :, i, j]  # [C, P]
        psi = _planes_first(op.filters.psi_v[of_value])
        beta = op.filters.beta_v[of_value].transpose(0, 1)
        weights = alpha[:, None, :, :]  # [P, 1, k, k]
        frame = self._image_window(info.size, pixel, window)
        return PixelView(
            layer=info.name,
            head=head,
            pixel=pixel,
            size=info.size,
            group=info.layer.group,
            neighbourhood=(values if psi.dim() == 6 else values[of_value]).transpose(0, 1),
            psi=psi,
            beta=beta,
            scores=(query[..., None, None] * a_k).sum(0) * info.layer.scale,
            alpha=alpha,
            effective=weights.reshape(len(alpha), *(1,) * (psi.dim() - 3), *window.size) * psi,
            positional=weights * beta,
            output=op.output[of_value, :, i, j].transpose(0, 1),
            window=frame,
            crop=crop(self.image, frame, math.nan),
        )

    def _image_window(self, size: tuple[int, int], pixel: Pixel, window: Window) -> tuple[int, int, int, int]:
        """Where the window around a pixel of a map lies in the image, of which the map is a smaller copy."""
        (down, across) = (side / n for side, n in zip(self.image.shape[-2:], size, strict=True))
        (i, j), (rows, columns) = pixel, window.reach
        return (
            math.floor((i - rows) * down),
            math.floor((j - columns) * across),
            math.ceil((i + rows + 1) * down),
            math.ceil((j + columns + 1) * across),
        )


# ---- the same as functions, for one question ----


def list_layers(model: nn.Module, image: Tensor) -> list[LayerInfo]:
    """The self-convolution layers of a model in the order they run, with the sizes of their maps."""
    return Inspection(model, image).layers


def look(model: nn.Module, image: Tensor, layer: str, pixel: Pixel, head: int) -> PixelView:
    """How a head of a layer computes its output at a pixel; see ``Inspection.look``."""
    return Inspection(model, image).look(layer, pixel, head)


def entropy_map(model: nn.Module, image: Tensor, layer: str) -> Tensor:
    """The relative entropy of attention, 0 to 1, ``[heads, P, h, w]``; see ``Inspection.entropy``."""
    return Inspection(model, image).entropy(layer)


@torch.no_grad()
def layer_filters(layer: LocalAttention2d) -> LayerFilters:
    """ψ^K, β^K, ψ^V, β^V of a layer, with the group axis; missing ones are the identity and 0."""
    psi_k, beta_k, psi_v, beta_v = layer.affine_parameters()
    like, size, planes = layer.w_in, layer.window.size, len(layer.domain)

    def filled(psi: Tensor | None, beta: Tensor | None, channels: int) -> tuple[Tensor, Tensor]:
        if psi is None:  # 1 at R = 1: every plane passes itself on
            psi = like.new_zeros(channels, planes, *size)
            psi[:, 0] = 1
        elif planes == 1:
            psi = psi.unsqueeze(-3)
        return psi.detach(), like.new_zeros(channels, *size) if beta is None else beta.detach()

    return LayerFilters(
        *filled(psi_k, beta_k, layer.key_channels), *filled(psi_v, beta_v, layer.out_channels)
    )


def _steered_filters(layer: LocalAttention2d) -> LayerFilters:
    """``layer_filters`` as every plane P sees them: ψ [C, P, R, k, k], β [C, P, k, k].

    A ψ that passes each plane on is the same for all of them, and no sum of basis functions.
    """
    group, filters = layer.group, layer_filters(layer)
    lifts = len(layer.domain) < len(group)
    passed = torch.ones(len(group), 1) if lifts else torch.eye(len(group))
    psi_k, psi_v = (
        passed.to(psi)[None, :, :, None, None].expand(len(psi), -1, -1, *psi.shape[-2:])
        if own is None
        else steer(psi, group, lifts)
        for own, psi in zip(layer.affine_parameters()[::2], (filters.psi_k, filters.psi_v), strict=True)
    )
    beta_k, beta_v = (group.steer(beta, planar=True) for beta in (filters.beta_k, filters.beta_v))
    return LayerFilters(psi_k, beta_k, psi_v, beta_v)


# ---- cutting out ----


def check_head(info: LayerInfo, head: int) -> None:
    heads = info.layer.num_heads
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < heads:
        raise ValueError(f"head: expected 0 to {heads - 1} for {info.name}; got {head!r}")


def _check_pixel(pixel: Pixel, size: tuple[int, int], of: str) -> Pixel:
    whole = len(pixel) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in pixel)
    if not whole or not all(0 <= n < side for n, side in zip(pixel, size, strict=True)):
        h, w = size
        raise ValueError(
            f"pixel: expected row 0 to {h - 1} and column 0 to {w - 1} of the {h}×{w} {of}; got {pixel!r}"
        )
    return pixel


def _neighbours(f: Tensor, pixel: Pixel, window: Window) -> Tensor:
    """What the window of a pixel holds: [..., h, w] -> [..., k, k]."""
    (i, j), (rows, columns), (d_i, d_j) = pixel, window.reach, window.dilation
    return pad(f, window)[..., i : i + 2 * rows + 1 : d_i, j : j + 2 * columns + 1 : d_j]


def _channels_of(head: int, heads: int, channels: int) -> slice:
    size = channels // heads
    return slice(head * size, (head + 1) * size)


def _affine_map(f: Tensor, psi: Tensor, beta: Tensor) -> Tensor:
    """Eq. 24 for all y of a window: Σ_R f(R, y) ψ(P, R, y) + β(P, y), [C, P, k, k]."""
    if psi.dim() == 6:
        return torch.einsum("crij,dcprij->dpij", f, psi) + beta
    return torch.einsum("crij,cprij->cpij", f, psi) + beta


def _planes_first(psi: Tensor) -> Tensor:
    """[C, P, R, k, k] -> [P, R, C, k, k]; dense [C, D, P, R, k, k] -> [P, R, C, D, k, k]."""
    return psi.permute(2, 3, 0, 1, 4, 5) if psi.dim() == 6 else psi.permute(1, 2, 0, 3, 4)


def crop(image: Tensor, window: tuple[int, int, int, int], outside: float) -> Tensor:
    """The part of an image [channels, h, w] that a window covers, and a number where there is no image."""
    top, left, bottom, right = window
    h, w = image.shape[-2:]
    cut = image.new_full((len(image), bottom - top, right - left), outside)
    inside = image[:, max(top, 0) : min(bottom, h), max(left, 0) : min(right, w)]
    row, column = max(-top, 0), max(-left, 0)
    cut[:, row : row + inside.shape[1], column : column + inside.shape[2]] = inside
    return cut
