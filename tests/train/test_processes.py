"""More than one process, on gloo: what they do together is what one does alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.tiny_runs import OPTIONS, PATIENCE, command, environment, tiny_config
from safetensors.torch import load_file

from selfconv.nn import GroupBatchNorm
from selfconv.train import Hardware, Run, RunConfig, Trainer, make_accelerator, open_data, train


def torchrun(port: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", "-m"]


def accelerate_launch(port: int) -> list[str]:
    return [
        "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
        "--machine_rank=0", "--main_process_ip=127.0.0.1", f"--main_process_port={port}",
        "--mixed_precision=no", "--dynamo_backend=no", "--module",
    ]  # fmt: skip


def launch(launcher: list[str], config: RunConfig, out: Path) -> str:
    file = out.parent / f"{out.name}.json"
    file.write_text(json.dumps(config.to_json()))
    arguments = ["selfconv.cli", "train", "--config", str(file), "--out", str(out)]
    run = subprocess.run(
        [sys.executable, *launcher, *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stderr
    assert Run.open(out).record.processes == 2
    return run.stdout


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def vector(tensors: dict[str, torch.Tensor], *, statistics: bool = True) -> torch.Tensor:
    """Weights, and perhaps batch norm's running statistics, as one vector."""
    names = sorted(
        n for n in tensors if tensors[n].is_floating_point() and (statistics or "running" not in n)
    )
    return torch.cat([tensors[name].flatten() for name in names])


def test_two_processes_do_what_one_does(data: Path, tmp_path: Path, free_port: int) -> None:
    """The same batches, batch norm over both shares. Rounding is measured by how far the weights moved."""
    config = tiny_config(data, "p4resnet29_asc", lr=0.01, ema=0.5, clip=1.0)
    first = vector(Trainer(config, open_data(config), make_accelerator(config.hardware)).network.state_dict())
    train(config, tmp_path / "one", quiet=True)
    printed = launch(torchrun(free_port), config, tmp_path / "two")
    assert printed.count("test accuracy") == 1
    one, two = vector(weights(tmp_path / "one")), vector(weights(tmp_path / "two"))
    assert (one - two).norm() < 1e-3 * (one - first).norm()
    records = [Run.open(tmp_path / name).record for name in ("one", "two")]
    assert records[0].test_loss == pytest.approx(records[1].test_loss, rel=1e-3)
    assert records[0].data == records[1].data


def test_without_synchronised_batch_norm_each_process_has_its_own(
    data: Path, tmp_path: Path, free_port: int
) -> None:
    """Through accelerate's launcher. One process that takes each batch in two parts has these gradients."""
    config = replace(
        tiny_config(data, lr=0.02, epochs=1), hardware=Hardware(device="cpu", sync_batch_norm=False)
    )
    launch(accelerate_launch(free_port), config, tmp_path / "two")
    train(replace(config, hardware=Hardware(accumulate=2)), tmp_path / "parts", quiet=True)
    train(config, tmp_path / "one", quiet=True)
    names = ("two", "parts", "one")
    two, parts, one = (vector(weights(tmp_path / name), statistics=False) for name in names)
    torch.testing.assert_close(two, parts, rtol=1e-5, atol=1e-6)
    assert (two - one).abs().max() > 1e-3  # the test can tell


def test_failure_is_reported_once(data: Path, tmp_path: Path, free_port: int) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    arguments = command("train", "--data", data, "--out", tmp_path, *OPTIONS)[2:]
    run = subprocess.run(
        [sys.executable, *torchrun(free_port), *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE,
    )
    assert run.returncode != 0
    ours = [line for line in run.stderr.splitlines() if line.startswith("selfconv:")]
    assert ours == [f"selfconv: {tmp_path}: expected a new or empty folder; it holds thesis.tex"]
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


# ---- signals ----


def signal_in_a_process(rank: int, folder: str, port: int) -> None:
    from selfconv.train.distributed import largest

    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=3)
    number = largest(0 if rank == 0 else signal.SIGTERM, torch.device("cpu"))
    (Path(folder) / str(rank)).write_text(str(number))
    torch.distributed.barrier()
    os._exit(0)


def test_a_signal_to_two_of_three_processes_is_that_signal_in_all(tmp_path: Path, free_port: int) -> None:
    """A sum over processes would be 30, and the exit code 158."""
    torch.multiprocessing.start_processes(
        signal_in_a_process, (str(tmp_path), free_port), 3, start_method="fork"
    )
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [str(int(signal.SIGTERM))] * 3


# ---- batch norm over all processes ----


def norm_case(training: bool) -> tuple[torch.Tensor, GroupBatchNorm]:
    torch.manual_seed(3)
    x = 2 + 3 * torch.randn(6, 5, 4, 3, 3, dtype=torch.float64)
    norm = GroupBatchNorm(5, group="p4", dtype=torch.float64).train(training)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    return x, norm


def norm_in_a_process(rank: int, folder: str, port: int, training: bool) -> None:
    from selfconv.train.distributed import sync_batch_norm

    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    x, norm = norm_case(training)
    sync_batch_norm(norm)
    own = x.chunk(2)[rank].clone().requires_grad_()
    y = norm(own)
    y.sin().sum().backward()
    grads = {f"d{name}": p.grad for name, p in norm.named_parameters()}
    for grad in grads.values():
        torch.distributed.all_reduce(grad)
    torch.save({"y": y.detach(), "dx": own.grad, **grads, **norm.state_dict()}, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may still be ending, and the interpreter aborts when it is first


@pytest.mark.parametrize("training", [True, False])
def test_synchronised_batch_norm_is_that_of_the_whole_batch(
    tmp_path: Path, free_port: int, training: bool
) -> None:
    torch.multiprocessing.start_processes(
        norm_in_a_process, (str(tmp_path), free_port, training), 2, start_method="fork"
    )
    x, norm = norm_case(training)
    y = norm(x.requires_grad_())
    y.sin().sum().backward()
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    expected = {"y": y.detach(), "dx": x.grad}
    for name, value in expected.items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), value, rtol=1e-11, atol=1e-11)
    expected = {**norm.state_dict(), **{f"d{name}": p.grad for name, p in norm.named_parameters()}}
    for part in parts:
        for name, value in expected.items():
            torch.testing.assert_close(part[name], value, rtol=1e-11, atol=1e-11)
