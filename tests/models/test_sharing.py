"""Saved, shared and loaded again: exactly, or with one line that says why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.errors
import pytest
import torch
from helpers.tiny_models import TINY, channels_last, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from selfconv.models import ResNet, create_model, fold_batch_norm, list_models, registry, table
from selfconv.models._sharing import load_weights

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:.*only approximately")
@pytest.mark.parametrize("name", list_models("*29*"))
def test_round_trip_is_exact(name: str, tmp_path: Path) -> None:
    overrides = {"num_heads": 1} if "sasa" in name else {}
    model = tiny(name, num_classes=3, **overrides)
    model.save_pretrained(tmp_path)
    again = ResNet.from_pretrained(tmp_path)
    assert not again.training
    assert again.config == model.config
    assert list(again.state_dict()) == list(model.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    assert torch.equal(again(IMAGES), model(IMAGES))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_a_loaded_model_can_be_trained(tmp_path: Path) -> None:
    tiny("p4resnet29_asc").save_pretrained(tmp_path)
    model = ResNet.from_pretrained(str(tmp_path)).train()
    model(IMAGES).sum().backward()
    assert all(p.grad is not None and p.requires_grad for p in model.parameters())


def test_dtype_and_memory_format_do_not_matter(tmp_path: Path) -> None:
    model = channels_last(tiny("p4resnet29_asc").to(torch.bfloat16))
    model.save_pretrained(tmp_path)
    again = ResNet.from_pretrained(tmp_path)
    assert next(again.parameters()).dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_the_config_follows_a_new_classifier(tmp_path: Path) -> None:
    model = tiny("resnet29_asc")
    for classes, pool in ((4, "max"), (0, "mean")):
        model.reset_classifier(classes, pool)
        model.save_pretrained(tmp_path)
        again = ResNet.from_pretrained(tmp_path)
        assert (again.num_classes, again.pool.mode) == (classes, pool)
        assert torch.equal(again(IMAGES), model(IMAGES))


def test_weights_are_safetensors_and_nothing_is_pickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was pickled")

    model = tiny("resnet29")
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    model.save_pretrained(tmp_path)
    ResNet.from_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no weights at .*model.safetensors"):
        ResNet.from_pretrained(tmp_path)


def test_a_model_that_its_config_does_not_describe_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no longer what its config describes.* stem.norm.weight is missing"
    ):
        fold_batch_norm(tiny("resnet29")).save_pretrained(tmp_path)  # type: ignore[operator]
    assert not (tmp_path / "model.safetensors").exists()


# ---- the hub, played by a folder ----

# huggingface_hub gave it a name of its own in 1.0
MISSING_ON_HUB = getattr(
    huggingface_hub.errors, "RemoteEntryNotFoundError", huggingface_hub.errors.EntryNotFoundError
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "hub"

    def download(repo_id: str, filename: str, **options: Any) -> str:
        assert set(options) >= {"revision", "token", "cache_dir", "force_download", "local_files_only"}
        if not (root / repo_id / filename).exists():
            raise MISSING_ON_HUB.__new__(MISSING_ON_HUB)
        return str(root / repo_id / filename)

    class Api:
        def __init__(self, token: str | None) -> None: ...

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            return type("Repo", (), {"repo_id": repo_id})

        def upload_folder(self, repo_id: str, folder_path: Path, **options: Any) -> str:
            shutil.copytree(folder_path, root / repo_id)
            return repo_id

    monkeypatch.setattr("selfconv.models._sharing.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    return root


def test_pushed_and_pulled(hub: Path) -> None:
    model = tiny("p4resnet29_asc_se")
    model.reset_classifier(4)
    model.push_to_hub("someone/model")
    assert torch.equal(ResNet.from_pretrained("someone/model")(IMAGES), model(IMAGES))


def test_a_hub_model_with_pickled_weights_alone_is_refused(hub: Path) -> None:
    tiny("resnet29").push_to_hub("someone/model")
    (hub / "someone/model/model.safetensors").rename(hub / "someone/model/pytorch_model.bin")
    with pytest.raises(
        FileNotFoundError, match=r"'someone/model' on the hub.*pickled weights are not loaded"
    ):
        ResNet.from_pretrained("someone/model")


def test_a_model_that_is_not_on_the_disk_is_not_called_pickled(tmp_path: Path) -> None:
    with pytest.raises(huggingface_hub.errors.LocalEntryNotFoundError):
        ResNet.from_pretrained("someone/model", cache_dir=tmp_path, local_files_only=True)


# ---- bad input ----


@pytest.mark.parametrize("place", ["./nowhere", "/nowhere/at/all", "nowhere", "~/nowhere"])
def test_no_such_folder(place: str) -> None:
    with pytest.raises(
        FileNotFoundError, match=f"no folder '{place}'; expected one that save_pretrained wrote"
    ):
        ResNet.from_pretrained(place)


def test_weights_of_another_architecture_are_named(tmp_path: Path) -> None:
    tiny("p4resnet29_asc").save_pretrained(tmp_path / "a")
    tiny("p4resnet29_asc", widths=(4, 8, 8)).save_pretrained(tmp_path / "b")
    shutil.copy(tmp_path / "b" / "model.safetensors", tmp_path / "a")
    expected = (
        r"model.safetensors holds the weights of another architecture: "
        r"stages.1.0.reduce.conv.weight is \[8, 64, 1, 1\] instead of \[4, 64, 1, 1\], "
        r"stages.1.0.reduce.norm.weight is \[8\] instead of \[4\], .*, and \d+ more$"
    )
    with pytest.raises(ValueError, match=expected):
        ResNet.from_pretrained(tmp_path / "a")
    tiny("p4resnet29").save_pretrained(tmp_path / "c")
    with pytest.raises(ValueError, match=r"spatial.conv.w_in is missing, .*, and \d+ more"):
        load_weights(tiny("p4resnet29_asc"), tmp_path / "c" / "model.safetensors")
    tiny("resnet29_se").save_pretrained(tmp_path / "d")
    with pytest.raises(ValueError, match=r"stages.0.0.se.expand.bias is not expected"):
        load_weights(tiny("resnet29"), tmp_path / "d" / "model.safetensors")


def test_a_failed_load_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny("resnet29_asc")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tiny("resnet29").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="another architecture"):
        load_weights(model, tmp_path / "model.safetensors")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_file_is_called_damaged(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "model.safetensors"
    if not (tmp_path / "whole").exists():
        tiny("resnet29").save_pretrained(tmp_path)
        file.rename(tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ValueError, match=r"model.safetensors: not a safetensors file, or a damaged") as error:
        ResNet.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_garbage_is_called_damaged(tmp_path: Path) -> None:
    tiny("resnet29").save_pretrained(tmp_path)
    for garbage in (b"\x80\x04\x95 a pickle, perhaps", bytes(100), b"\xff" * 100):
        (tmp_path / "model.safetensors").write_bytes(garbage)
        with pytest.raises(ValueError, match="not a safetensors file, or a damaged or truncated one"):
            ResNet.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("{", ValueError, "config.json: expected JSON"),
        ("[1, 2]", ValueError, r"config.json: expected a JSON object; got \[1, 2\]"),
        ('{"depht": 29}', ValueError, "config.json: unknown option depht"),
        ('{"depth": "29"}', ValueError, "depth: expected an integer ≥ 11; got '29'"),
        ('{"widths": "abc"}', ValueError, "widths: expected three positive integers; got 'abc'"),
        ('{"depth": 900000002}', ValueError, "depth: expected 9n[+]2 up to 1001"),
        ('{"group": ["p4"]}', ValueError, "unknown group"),
        ('{"num_classes": -1}', ValueError, "num_classes: expected an integer ≥ 0; got -1"),
    ],
)
def test_a_config_that_describes_nothing(
    tmp_path: Path, content: str, error: type[Exception], message: str
) -> None:
    tiny("resnet29").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(error, match=message):
        ResNet.from_pretrained(tmp_path)


def test_a_config_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*config.json"):
        ResNet.from_pretrained(tmp_path)


# ---- weights that come with the package ----


def test_saved_weights_have_the_permissions_of_other_new_files(tmp_path: Path) -> None:
    create_model("resnet29", depth=11, widths=(8, 8, 8)).save_pretrained(tmp_path)
    (tmp_path / "new").touch()
    modes = {name: (tmp_path / name).stat().st_mode for name in ("model.safetensors", "new")}
    assert modes["model.safetensors"] == modes["new"]


def test_no_weights_are_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (table, registry):
        monkeypatch.setattr(module, "WEIGHTS", tmp_path)
    with pytest.raises(
        ValueError, match="no weights are shipped for 'resnet29'; this version ships none at all"
    ):
        create_model("resnet29", pretrained=True)


def test_shipped_weights_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (table, registry):
        monkeypatch.setattr(module, "WEIGHTS", tmp_path)
    model = tiny("p4resnet29_asc", num_classes=4, in_channels=1)
    model.save_pretrained(tmp_path / "p4resnet29_asc")
    grey = torch.randn(1, 1, 8, 8)
    found = create_model("p4resnet29_asc", pretrained=True)
    assert found.training
    assert found.config == model.config
    assert torch.equal(found.eval()(grey), model(grey))
    other = create_model("p4resnet29_asc", 7, pretrained=True).eval()
    assert other(grey).shape == (1, 7)
    assert torch.equal(other.forward_features(grey), model.forward_features(grey))
    with pytest.raises(ValueError, match="for 'resnet29'; there are some for p4resnet29_asc"):
        create_model("resnet29", pretrained=True)
    with pytest.raises(ValueError, match=r"weights for images of 5 channels; got weights for 1"):
        create_model("p4resnet29_asc", in_channels=5, pretrained=True)


def test_config_json_holds_every_option(tmp_path: Path) -> None:
    create_model("resnet29_asc", **TINY).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {
        "depth": 11, "group": "z2", "spatial": "asc", "squeeze_excite": False, "widths": [4, 4, 8],
        "kernel_size": 3, "num_heads": 2, "psi": "channel", "affine": "both", "scale": "width",
        "affine_std": None, "zero_gamma": True,
        "downsample": "pool", "in_channels": 3, "num_classes": 10, "pool": "mean",
        "stem": "conv",
    }  # fmt: skip


def test_weights_with_a_name_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (table, registry):
        monkeypatch.setattr(module, "WEIGHTS", tmp_path)
    model = tiny("p4resnet29_asc", num_classes=4, in_channels=1)
    model.save_pretrained(tmp_path / "mine")
    assert list_models(pretrained=True) == ["mine"]
    assert "mine" not in list_models()
    assert create_model("mine", pretrained=True).config == model.config
    assert create_model("mine", 3, pretrained=True).num_classes == 3
    with pytest.raises(
        ValueError, match="'mine' is a model with its weights; expected pretrained=True for it"
    ):
        create_model("mine")
    with pytest.raises(ValueError, match="unknown model 'yours'"):
        create_model("yours", pretrained=True)
