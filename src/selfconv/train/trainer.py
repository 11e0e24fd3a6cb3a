"""A network in training: everything that a step changes, and how it is saved and restored."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from selfconv.data import Augment, Batches, DataInfo, Dataset
from selfconv.models import ResNet, create_model
from selfconv.train import checkpoints
from selfconv.train.checkpoints import Checkpoint
from selfconv.train.config import Recipe, RunConfig
from selfconv.train.distributed import sync_batch_norm

if TYPE_CHECKING:
    from accelerate import Accelerator

EVALUATION_BATCH = 256


@dataclass
class MetricTotals:
    """Of losses and correct answers over images."""

    loss: float = 0.0
    correct: float = 0.0
    images: float = 0.0

    def add(self, values: list[float]) -> None:
        loss, correct, images = values
        self.loss, self.correct, self.images = self.loss + loss, self.correct + correct, self.images + images

    @property
    def means(self) -> tuple[float, float]:
        """Loss and accuracy."""
        return self.loss / self.images, self.correct / self.images


@dataclass
class State:
    """How far a run has come. With the tensors of a checkpoint, all that it needs to go on."""

    epoch: int = 0  # complete ones
    step: int = 0  # complete ones of the next epoch
    sums: MetricTotals = field(default_factory=MetricTotals)  # of those steps
    seconds: float = 0.0  # of those steps
    history: list[dict[str, Any]] = field(default_factory=list)


def rate(recipe: Recipe, epoch: int, step: int, steps: int) -> float:
    """The learning rate of a step: a function of where it stands, so that there is nothing to save.

    ``"step"`` changes it once an epoch, as the paper does, ``"cosine"`` at every step.
    """
    if recipe.schedule == "step":
        warmup = round(recipe.warmup * recipe.epochs)
        rise = min(1.0, (epoch + 1) / warmup) if warmup else 1.0
        return recipe.lr * rise * 0.1 ** sum(epoch >= share * recipe.epochs for share in (0.5, 0.75))
    done = (epoch * steps + step + 0.5) / (recipe.epochs * steps)  # its middle: no step has a rate of 0
    if done < recipe.warmup:
        return recipe.lr * done / recipe.warmup
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * (done - recipe.warmup) / (1 - recipe.warmup)))


def parameter_groups(network: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """The parameters for an optimizer, those that decay first."""
    decays: list[nn.Parameter] = []
    rests: list[nn.Parameter] = []
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_map = name in ("weight", "w_in", "w_out") and not isinstance(module, _BatchNorm)
            (decays if recipe.decay == "all" or is_map else rests).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decays, "weight_decay": recipe.weight_decay}]
    return groups + [{"params": rests, "weight_decay": 0.0}] * bool(rests)


def build_model(config: RunConfig, info: DataInfo) -> ResNet:
    """The network of a run, from the current random state; raises ValueError if it cannot take the images."""
    model = create_model(
        config.model.name, len(info.class_names), info.in_channels, **config.model.overrides()
    )
    shapeless = copy.deepcopy(model).to("meta").eval()
    with torch.no_grad():
        for size in {info.size, *(config.recipe.sizes or ())}:
            shapeless(torch.empty(1, info.in_channels, size, size, device="meta"))
    return model


class Trainer:
    """A network in training: its weights, their optimizer and running mean, and the batches they see."""

    def __init__(self, config: RunConfig, data: Dataset, accelerator: Accelerator) -> None:
        recipe, engine = config.recipe, config.engine
        self.recipe, self.accelerator = recipe, accelerator
        self.state = State()
        torch.manual_seed(config.seed)
        self.network = build_model(config, DataInfo.of(data)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if accelerator.num_processes > 1 and engine.sync_batch_norm:
            sync_batch_norm(self.network)
        optimizer = torch.optim.SGD(
            parameter_groups(self.network, recipe), lr=recipe.lr, momentum=recipe.momentum, nesterov=True
        )
        self.model, self.optimizer = accelerator.prepare(self.network, optimizer)
        self.mean_weights = self._weights(copied=True) if recipe.ema is not None else {}
        self.batches = self._batches(
            data, "train", recipe.batch_size, shuffle=True, seed=config.seed, augment=augmentation(recipe)
        )
        self.val, self.test = (self._batches(data, part, EVALUATION_BATCH) for part in ("val", "test"))
        share = self.batches.batch_size // accelerator.num_processes
        if share % engine.accumulate:
            raise ValueError(
                f"batch_size: expected a multiple of accumulate × processes = "
                f"{engine.accumulate * accelerator.num_processes}; got {self.batches.batch_size}"
            )
        self.part = share // engine.accumulate

    def _batches(self, data: Dataset, part: str, size: int, **options: Any) -> Batches:
        world = self.accelerator.num_processes
        size = size if part == "train" else -(-size // world) * world  # a multiple, without a say in results
        split = getattr(data, part).to(self.accelerator.device)
        place = {"rank": self.accelerator.process_index, "world_size": world}
        return Batches(split, size, mean=data.mean, std=data.std, **place, **options)

    # ---- one step ----

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Moves the weights by a batch; returns the sum of its losses, of correct answers, and its images."""
        self.model.train()
        sums = torch.zeros(3, device=images.device)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.recipe, self.state.epoch, self.state.step, len(self.batches))
        for x, y in zip(images.split(self.part), labels.split(self.part), strict=True):
            with self.accelerator.accumulate(self.model):
                with self.accelerator.autocast():
                    output = self.model(x)
                loss = F.cross_entropy(output.float(), y, label_smoothing=self.recipe.label_smoothing)
                self.accelerator.backward(loss)
                if self.recipe.clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            sums += _sums(loss.detach() * len(y), output, y)
        self._move_mean()
        self.state.step += 1
        return sums

    def _weights(self, *, copied: bool = False) -> dict[str, Tensor]:
        weights = {name: value.detach() for name, value in self.network.state_dict().items()}
        return {name: value.clone() for name, value in weights.items()} if copied else weights

    def _move_mean(self) -> None:
        if self.recipe.ema is None:
            return
        for name, value in self._weights().items():
            mean = self.mean_weights[name]
            if value.is_floating_point():
                mean.lerp_(value, 1 - self.recipe.ema)
            else:
                mean.copy_(value)

    # ---- evaluation ----

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> MetricTotals:
        """Of the weights that the run would end with now, over all processes."""
        with self._final_weights():
            self.network.eval()
            sums = torch.zeros(3, device=self.accelerator.device)
            for images, labels in batches:
                if len(labels):  # of the last batch a process may get none
                    with self.accelerator.autocast():
                        output = self.network(images)
                    loss = F.cross_entropy(output.float(), labels, reduction="sum")
                    sums += _sums(loss, output, labels)
        total = MetricTotals()
        total.add(self.accelerator.reduce(sums, "sum").tolist())
        return total

    @contextmanager
    def _final_weights(self) -> Iterator[None]:
        """The network with the weights that count: their running mean, if there is one."""
        if self.accelerator.num_processes > 1:  # each process has moved its own running statistics
            for buffer in self.network.buffers():
                torch.distributed.broadcast(buffer, 0)
        if self.recipe.ema is None:
            yield
            return
        own = self._weights(copied=True)
        self.network.load_state_dict(self.mean_weights)
        yield
        self.network.load_state_dict(own)

    def finish(self) -> ResNet:
        """The network with its final weights."""
        if self.recipe.ema is not None:
            self.network.load_state_dict(self.mean_weights)
        return self.network

    # ---- saving ----

    def checkpoint(self) -> Checkpoint:
        optimizer = self.optimizer.state_dict()
        scaler = self.accelerator.scaler
        parts = {
            "model": self._weights(),
            "ema": self.mean_weights,
            "optimizer": {
                str(index): entry["momentum_buffer"]
                for index, entry in optimizer["state"].items()
                if entry.get("momentum_buffer") is not None
            },
            "random": checkpoints.random_states(),
        }
        tensors = {f"{part}/{name}": t for part, values in parts.items() for name, t in values.items()}
        rest = {
            "scaler": scaler.state_dict() if scaler is not None else None,
            "threads": torch.get_num_threads(),
        }
        return Checkpoint(tensors, asdict(self.state) | rest)

    def restore(self, checkpoint: Checkpoint) -> None:
        state = dict(checkpoint.state)
        scaler, threads = state.pop("scaler"), state.pop("threads")
        if threads != torch.get_num_threads():
            warnings.warn(
                f"this run began with {threads} threads and goes on with {torch.get_num_threads()}: it will "
                "not end with the same bits, since sums are rounded in another order",
                stacklevel=2,
            )
        self.state = State(**state | {"sums": MetricTotals(**state["sums"])})
        self.network.load_state_dict(checkpoint.tensors("model"))
        for name, value in checkpoint.tensors("ema").items():
            self.mean_weights[name].copy_(value)
        buffers = checkpoint.tensors("optimizer")
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            if str(index) in buffers:  # in the weight's memory format, so that sums round as they did
                buffer = torch.empty_like(parameter).copy_(buffers[str(index)])
                self.optimizer.state[parameter]["momentum_buffer"] = buffer
        if scaler is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(scaler)
        checkpoints.set_random_states(checkpoint.tensors("random"))


def _sums(loss: Tensor, output: Tensor, labels: Tensor) -> Tensor:
    correct = (output.argmax(1) == labels).sum()
    return torch.stack([loss.float(), correct.float(), torch.full_like(loss, len(labels))])


def augmentation(recipe: Recipe) -> Augment:
    return Augment(flip=recipe.flip, pad=recipe.pad, rotate=recipe.rotate)
