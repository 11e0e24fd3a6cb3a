"""What the page computes, and which questions it refuses."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tiny_runs import tiny_config, tiny_data
from hypothesis import given
from hypothesis import strategies as st

from selfconv.explorer._answers import Answers, Choice, encode_image
from selfconv.explorer._comparison import (
    Comparison,
    change_in_words,
    exact_turns_in_words,
    nearest_pixel,
    rotate_image,
    rotate_position,
    symmetry_in_words,
)
from selfconv.groups import get_group
from selfconv.train import train


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison.open()


@pytest.mark.parametrize("places", [(), ("digits_p4_asc",), ("resnet29.cifar10",)])
def test_models_side_by_side_take_the_same_images(places: tuple[str, ...]) -> None:
    opened = Comparison.open(*places).models
    assert [model.name for model in opened[: len(places)]] == [*places]
    assert len({(m.data.size, m.data.in_channels, *m.data.class_names) for m in opened}) == 1
    assert len(opened) == (1 if "resnet29.cifar10" in places else 2)


# ---- turning ----


@given(st.integers(2, 9), st.integers(-5, 5), st.data())
def test_a_place_goes_where_its_pixel_goes(size: int, quarters: int, data: st.DataObject) -> None:
    row, column = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    image = np.zeros((1, size, size), np.uint8)
    image[0, row, column] = 255
    place = nearest_pixel(rotate_position((row, column), 90 * quarters, size), size)
    assert np.argwhere(rotate_image(image, 90 * quarters)[0]).tolist() == [list(place)]


@given(st.floats(-360, 360), st.integers(0, 255))
def test_rotation_of_a_constant_image_is_the_image(degrees: float, grey: int) -> None:
    image = np.full((3, 8, 8), grey, np.uint8)
    assert np.array_equal(rotate_image(image, degrees), image)


def test_any_angle_turns_counter_clockwise() -> None:
    image = np.zeros((1, 21, 21), np.uint8)
    image[0, 9:12, 17:20] = 200  # right of the centre
    for degrees in (30, 60, 120, -45):
        weights = rotate_image(image, degrees)[0] / 200
        rows, columns = np.indices(weights.shape)
        found = (weights * rows).sum() / weights.sum(), (weights * columns).sum() / weights.sum()
        assert found == pytest.approx(rotate_position((10, 18), degrees, 21), abs=0.3)


def test_changes_in_words() -> None:
    before = np.array([0.9, 0.1], np.float32)
    names = ["six", "nine"]
    assert change_in_words(before, before, names) == "same prediction, probabilities are identical"
    after = np.array([0.9 - 3e-7, 0.1 + 3e-7], np.float32)
    assert re.fullmatch(
        r"same prediction, probabilities differ by [23]e-7", change_in_words(before, after, names)
    )
    changed = change_in_words(before, before[::-1], names)
    assert changed == "prediction changed from six to nine, probabilities differ by 0.80"


# ---- the models ----


def test_turning_changes_no_p4_prediction(comparison: Comparison) -> None:
    planar, p4 = comparison.models
    assert (planar.model.group.name, p4.model.group.name) == ("z2", "p4")
    changed = 0
    for sample in comparison.samples:
        for quarters in (1, 2, 3):
            turned = rotate_image(sample.image, 90 * quarters)
            difference = comparison.probabilities(1, turned) - comparison.probabilities(1, sample.image)
            assert np.abs(difference).max() < 1e-5
            errors = [comparison.map_error(m, sample.image, quarters, comparison.layer(m, 2)) for m in (0, 1)]
            assert errors[1] is not None
            assert errors[1] < 1e-4
            assert errors[0] is not None
            assert errors[0] > 0.1
            changed += (
                comparison.probabilities(0, turned).argmax()
                != comparison.probabilities(0, sample.image).argmax()
            )
    assert changed > len(comparison.samples)


def test_samples_are_of_every_class_and_known_to_the_models(comparison: Comparison) -> None:
    assert [sample.label for sample in comparison.samples] == comparison.class_names
    right = [
        comparison.class_names[int(comparison.probabilities(model, sample.image).argmax())] == sample.label
        for model in (0, 1)
        for sample in comparison.samples
    ]
    assert sum(right) >= 18


def test_inspections_are_remembered(comparison: Comparison) -> None:
    image = comparison.samples[0].image
    assert comparison.inspect(0, image) is comparison.inspect(0, image.copy())
    assert comparison.inspect(0, image) is not comparison.inspect(1, image)
    for n in range(40):
        comparison.inspect(0, np.full_like(image, n))
    assert len(comparison._seen) <= 32


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a convolutional and a p4 network on the digits, and of one that knows other classes."""
    folder = tmp_path_factory.mktemp("runs")
    data = tiny_data(folder)
    train(tiny_config(data, "resnet29"), folder / "conv")
    train(tiny_config(data, "p4resnet29_asc"), folder / "p4")
    with np.load(data) as arrays:
        two = dict(arrays)
    for part in ("train", "test"):
        keep = two[f"y_{part}"] < 2
        two[f"x_{part}"], two[f"y_{part}"] = two[f"x_{part}"][keep], two[f"y_{part}"][keep]
    np.savez(folder / "two.npz", **two)
    train(tiny_config(folder / "two.npz", "p4resnet29_asc"), folder / "two")
    return folder


def test_a_run_is_shown_beside_its_counterpart(runs: Path) -> None:
    assert [t.name for t in Comparison.open(runs / "conv").models] == ["conv", "digits_p4_asc"]
    assert [t.name for t in Comparison.open(runs / "p4").models] == ["p4", "digits_asc"]


def test_a_run_with_other_classes_is_shown_alone(runs: Path) -> None:
    comparison = Comparison.open(runs / "two")
    assert [t.name for t in comparison.models] == ["two"]
    assert {sample.label for sample in comparison.samples} == {"0", "1"}
    assert 2 < len(comparison.samples) <= 12


def test_digits_stand_in_for_data_that_is_gone(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "two", tmp_path / "two")
    config, record = (tmp_path / "two" / f"{name}.json" for name in ("config", "record"))
    content = json.loads(config.read_text())
    content["data"]["source"] = str(tmp_path / "gone.npz")
    config.write_text(json.dumps(content))
    record.write_text(json.dumps(json.loads(record.read_text()) | {"config": content}))
    comparison = Comparison.open(tmp_path / "two")
    said = "The images of two are not on this machine; choose an image of your own."
    assert comparison.note == f"{said} These digits stand in for them."
    assert comparison.samples[0].image.shape == (1, 16, 16)


@pytest.mark.parametrize("name", ["conv", "p4", "two"])
def test_every_answer_for_every_kind_of_run(runs: Path, name: str) -> None:
    answers = Answers(Comparison.open(runs / name))
    start = json.loads(json.dumps(answers.start()))
    assert start["models"][0]["name"] == name
    for layer in range(len(start["layers"])):
        for angle in (0, 90, 33):
            there = [model["layers"][layer] for model in start["models"]]
            last = {f"{name}s": [one[f"{name}s"] - 1 for one in there] for name in ("head", "channel")}
            body = {"image": 0, "angle": angle, "home": [3, 4], "layer": layer, **last}
            answer = json.loads(json.dumps(answers.look(answers.choice(body))))
            for model, found in zip(start["models"], answer["models"], strict=True):
                assert sum(found["probabilities"]) == pytest.approx(1, abs=1e-5)
                assert array(found["maps"]["turned"]).shape[0] == len(model["planes"])
    assert (answer["models"][0]["filters"] is None) == (name == "conv")
    seen = answers.training()["models"][0]
    assert [row["epoch"] for row in seen["metrics"]] == [1, 2]
    assert len(seen["images"]) == (17 if name == "two" else 24)  # as many as there are
    assert "moved by up to 1 pixel, never flipped, never turned" in seen["said"]


def test_a_network_beside_a_deeper_one_says_which_layer_it_shows(runs: Path) -> None:
    """The layers to choose from are those of the network with most; each offers what it has itself."""
    comparison = Comparison.open(runs / "conv", runs / "p4")
    answers = Answers(comparison)
    start = answers.start()
    assert start["lead"] == 1  # the other has no self convolution
    assert comparison.attends == [False, True]
    assert [title.split("(")[1] for title in start["layers"]] == [f"{n})" for n in comparison.layers(1)]
    names = comparison.layers(1)
    assert [comparison.layer(0, number) for number in range(len(names))] == names  # of the same name
    conv, p4 = (model["layers"][0] for model in start["models"])
    assert (conv["heads"], conv["channels"]) == (1, 8)
    assert p4["heads"] * p4["channels"] == 8
    assert (conv["window"], p4["window"]) == (0, 5)
    comparison._layers[0] = names[:1]  # as if it were shallower
    body = {"image": 0, "angle": 0, "home": [3, 4], "layer": 2, "heads": [0, 0], "channels": [0, 0]}
    said = answers.look(answers.choice(body))["models"][0]["maps"]["where"]
    assert said.startswith(f"{names[0]}, shown for {names[2]}, which this network does not have, ")


def test_models_side_by_side(runs: Path) -> None:
    assert [t.name for t in Comparison.open(runs / "conv", runs / "p4").models] == ["conv", "p4"]
    with pytest.raises(
        ValueError, match="expected models for the same classes and images; p4 is for 10 classes"
    ):
        Comparison.open(runs / "p4", runs / "two")


def test_stand_ins_have_no_true_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answers = Answers(Comparison.open("resnet29.cifar10"))
    start = answers.start()
    assert start["note"].startswith(
        "The images of cifar10 are not on this machine; choose an image of your own."
    )
    assert {sample["label"] for sample in start["samples"]} == {None}
    assert start["samples"][0]["name"] == "digit 0"
    assert not start["attention"]
    assert "Now the images of cifar10 are not on this machine." in answers.training()["models"][0]["said"]


def test_layers_heads_and_channels_as_the_commands_name_them(answers: Answers) -> None:
    layers = answers.start()["layers"]
    assert layers[0] == "1 of 3: 16×16 map (stages.0.0.spatial.conv)"
    assert layers[-1] == "3 of 3: 8×8 map, pooled to 4×4 after attention (stages.2.0.spatial.conv)"
    found = answers.look(answers.choice(CALL | {"heads": [1, 2]}))["models"][0]
    assert found["filters"]["where"].startswith("stages.0.0.spatial.conv, row 3, column 4 of the 16×16 map, ")
    assert found["filters"]["where"].endswith("head 1, channel 0")
    assert found["maps"]["where"] == "stages.0.0.spatial.conv, 16×16 map, channel 4 of 0 to 15"


# ---- the answers ----


def array(content: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(content["data"]), "<f4").reshape(content["shape"])


@pytest.fixture(scope="module")
def answers(comparison: Comparison) -> Answers:
    return Answers(comparison)


def test_the_filters_shown_are_those_of_the_layer(comparison: Comparison, answers: Answers) -> None:
    image, pixel = comparison.samples[3].image, (5, 9)
    found = answers.pixel(Choice(image, 0, pixel, 0, (2, 2), (0, 0)))
    assert found["pixel"] == list(pixel)
    for model in (0, 1):
        filters = found["models"][model]["filters"]
        view = comparison.inspect(model, image).look(comparison.layer(model, 0), pixel, 2)
        expected = {
            "value": view.neighbourhood[:, 0], "psi": view.psi[:, :, 0], "alpha": view.alpha,
            "effective": view.effective[:, :, 0], "positional": view.positional[:, 0],
        }  # fmt: skip
        for name, values in expected.items():
            assert np.array_equal(array(filters[name]), values.numpy()), name
        assert array(filters["alpha"]).sum((1, 2)) == pytest.approx(1, abs=1e-5)
        heads = array(filters["heads"])
        assert np.array_equal(heads[2], view.alpha.numpy())
        terms = (array(filters["effective"]) * array(filters["value"])).sum((1, 2, 3))
        terms += array(filters["positional"]).sum((1, 2))
        assert terms == pytest.approx(filters["output"], abs=1e-4)


def test_the_evidence_shown_adds_up(comparison: Comparison, answers: Answers) -> None:
    for angle in (0, 90, 20):
        choice = Choice(comparison.samples[6].image, angle, (8, 8), 0, (0, 0), (0, 0))
        occlusion = answers.occlusion(choice)["models"]
        for model, found in enumerate(answers.look(choice)["models"]):
            activation = array(found["activation"])
            assert activation.sum((1, 2)) == pytest.approx(found["logits"], abs=1e-5)
            assert array(occlusion[model]).shape == (10, 8, 8)


def test_the_first_view(comparison: Comparison, answers: Answers) -> None:
    """A sample that all models know and that turning deceives; a pixel where attention is selective."""
    first = answers.start()["first"]
    sample = comparison.samples[first["sample"]]
    for model in (0, 1):
        best = int(comparison.probabilities(model, sample.image).argmax())
        assert comparison.class_names[best] == sample.label
    turned = np.stack([np.rot90(sample.image, quarters, (1, 2)) for quarters in (1, 2, 3)])
    assert sample.label not in [comparison.class_names[n] for n in comparison.answers(0, turned).argmax(1)]
    background = np.median(
        np.concatenate([sample.image[0, [0, -1]].ravel(), sample.image[0, :, [0, -1]].ravel()])
    )
    row, column = first["pixel"]
    difference = np.abs(sample.image[0].astype(int) - background)
    assert difference[row, column] > difference.max() / 3  # on the object
    assert 2 <= min(first["pixel"]) <= max(first["pixel"]) < 14
    name = comparison.layer(0, first["layer"])
    for model, head in enumerate(first["heads"]):
        entropy = comparison.inspect(model, sample.image).entropy(name)
        assert entropy[head, :, row, column].mean() < entropy.median()


def test_titles_say_the_network(answers: Answers) -> None:
    models = answers.start()["models"]
    assert [(m["name"], m["title"]) for m in models] == [
        ("digits_asc", "planar network, affine self convolution"),
        ("digits_p4_asc", "p4 network, affine self convolution"),
    ]


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ("z2", "shifts only: rotating the image may change its answer"), ("p4", "shifts and turns by 90°"),
        ("p4m", "shifts, turns by 90° and mirroring"), ("c16", "shifts and turns by 22.5°"),
    ],
)  # fmt: skip
def test_what_a_network_is_built_for(group: str, words: str) -> None:
    assert symmetry_in_words(get_group(group)) == f"Equivariant to {words}."


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (["z2"], "No turn is exact for planar networks."),
        (["z2", "p4", "p4m", "p4"], "No turn is exact for planar networks. Only multiples of 90° are exact "
         "for p4 and p4m: in between, as at 45°, answers may change."),
        (["c8"], "Only multiples of 90° are exact for c8, other multiples of 45° are approximate: in "
         "between, as at 22.5°, answers may change."),
    ],
)  # fmt: skip
def test_which_turns_are_exact(groups: list[str], words: str) -> None:
    assert exact_turns_in_words([get_group(group) for group in groups]) == words


def test_the_curve_has_the_answers_of_the_page(comparison: Comparison, answers: Answers) -> None:
    for angle in (0, 90, 20):
        choice = Choice(comparison.samples[4].image, angle, (8, 8), 0, (0, 0), (0, 0))
        for alone, model in zip(
            answers.answer(choice)["models"], answers.look(choice)["models"], strict=True
        ):
            assert alone == pytest.approx(model["probabilities"], abs=1e-6)


CALL = {"image": 0, "angle": 0, "home": [3, 4], "layer": 0, "heads": [0, 0], "channels": [0, 0]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": 10}, "image: expected the number of a sample, or 256 bytes in base64"),
        ({"image": -1}, "image: "), ({"image": True}, "image: "), ({"image": "AAAA"}, "image: "),
        ({"image": "*" * 344}, "image: "), ({"image": "é"}, "image: "),
        ({"image": ["/etc/passwd"]}, "image: "),
        ({"angle": 181}, "angle: expected −180 to 180"), ({"angle": "90"}, "angle: "),
        ({"angle": 10**400}, "angle: "),
        ({"home": [1]}, "home: expected a row and a column"), ({"home": [1, None]}, "home: "),
        ({"layer": -1}, "layer: expected 0 to 2; got -1"), ({"layer": 3}, "layer: expected 0 to 2; got 3"),
        ({"layer": 10**400}, "layer: expected 0 to 2; got something else"),
        ({"heads": [0, 4]}, "heads, digits_p4_asc: expected 0 to 3; got 4"), ({"heads": [1.5, 0]}, "heads, "),
        ({"heads": 1}, "heads: expected a list of 2"), ({"heads": [0]}, "heads: expected a list of 2"),
        ({"channels": [3, 3]}, "channels, digits_p4_asc: expected 0 to 1; got 3"),
        ({"channels": [0, True]}, "channels, "), ({"more": 1}, "expected angle, channels, heads, home, "),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_calls(answers: Answers, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        answers.choice(CALL | change)
    assert str(caught.value).startswith(message)
    with pytest.raises(ValueError):
        answers.choice([CALL])


def test_image_by_number_or_by_content(comparison: Comparison, answers: Answers) -> None:
    carried = answers.choice(CALL | {"image": encode_image(comparison.samples[2].image)})
    named = answers.choice(CALL | {"image": 2})
    assert np.array_equal(carried.image, named.image)
    assert carried.image.flags.writeable  # torch warns of others
