"""``import selfconv.timm`` registers the models with timm: ``timm.create_model("p4resnet29_asc")``.

They accept timm's ``num_classes`` (0 for no classifier), ``in_chans``, ``global_pool`` (``"avg"`` or
``"max"``) and ``pretrained``, and every override of ``selfconv.create_model``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from selfconv._extras import require

require("selfconv.timm", "timm")

try:
    from timm.models import generate_default_cfgs, register_model, resolve_pretrained_cfg
except (RuntimeError, AttributeError) as error:  # of torchvision, which timm imports
    import torch

    raise ImportError(
        f"selfconv.timm: timm cannot be imported beside torch {torch.__version__} "
        f"({' '.join(str(error).split())[:80]}): install the torchvision that was built for this torch, from "
        "the same index"
    ) from error

from selfconv.models import ResNet, create_model, list_models  # noqa: E402

__all__: list[str] = []  # register_model adds the models' names

# where timm looks up how to prepare images for a model; mean and deviation are those of CIFAR-10
default_cfgs = generate_default_cfgs(
    {
        name: {
            "input_size": (3, 32, 32),
            "min_input_size": (3, 4, 4),
            "num_classes": 10,
            "mean": (0.4914, 0.4822, 0.4465),
            "std": (0.2470, 0.2435, 0.2616),
            "crop_pct": 1.0,
            "first_conv": "stem.conv",
            "classifier": "fc",
        }
        for name in list_models()
    }
)


def _entrypoint(name: str) -> Callable[..., ResNet]:
    def build(
        pretrained: bool = False,
        *,
        num_classes: int | None = None,
        in_chans: int | None = None,
        global_pool: str | None = None,
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: dict[str, Any] | None = None,
        cache_dir: object = None,
        drop_rate: float = 0.0,
        **overrides: Any,
    ) -> ResNet:
        if drop_rate != 0:
            raise ValueError(f"{name} has no dropout; got drop_rate={drop_rate}")
        model = create_model(
            name,
            None if num_classes == 0 else num_classes,
            in_chans,
            pretrained=pretrained,
            pool="mean" if global_pool == "avg" else global_pool,
            **overrides,
        )
        if num_classes == 0:
            model.reset_classifier(0)
        cfg = resolve_pretrained_cfg(name, pretrained_cfg, pretrained_cfg_overlay)
        model.pretrained_cfg = model.default_cfg = cfg.to_dict()
        return model

    build.__name__ = build.__qualname__ = name
    return register_model(build)


globals().update({name: _entrypoint(name) for name in list_models()})
