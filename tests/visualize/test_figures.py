"""The pictures: every panel there, the numbers in it, all text readable; and the command that writes them."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from helpers.tiny_models import tiny
from helpers.tiny_runs import run_cli, tiny_config, tiny_data
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from selfconv._resample import round_mask
from selfconv.models import create_model
from selfconv.train import train
from selfconv.visualize import Inspection, equivariance_view, layer_filters
from selfconv.visualize._choice import choose_pixels
from selfconv.visualize._draw import FRAME, POSITIVE, SIGNED
from selfconv.visualize.figures import (
    entropy_figure,
    equivariance_figure,
    explanation_figure,
    filters_figure,
    pixel_figure,
    schematic_figure,
    template_figure,
)

LAYER = "stages.0.0.spatial.conv"
IMAGE = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))


def texts(figure: Figure) -> list[Text]:
    """All that is written in a figure."""
    found = [text for part in (figure, *figure.subfigs) for text in part.texts]
    for axes in figure.axes:
        if not axes.axison:
            continue
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(limits)
            for place, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True):
                if low <= place <= high:
                    found.append(label)
    return [text for text in found if text.get_visible() and text.get_text()]


def assert_readable(figure: Figure) -> None:
    """Nothing is cut off, and no two texts cover each other."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts(figure)]
    assert len(boxes) > 3
    for name, box in boxes:
        inside = (
            box.x0 >= -1
            and box.y0 >= -1
            and box.x1 <= figure.bbox.width + 1
            and box.y1 <= figure.bbox.height + 1
        )
        assert inside, f"{name!r} is cut off"
    for (a, first), (b, second) in combinations(boxes, 2):
        across = min(first.x1, second.x1) - max(first.x0, second.x0)
        down = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert across <= 1 or down <= 1, f"{a!r} and {b!r} cover each other"


def panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.images]


def shown(axes: Axes) -> Any:
    return np.ma.filled(np.ma.asarray(axes.images[0].get_array(), dtype=float), np.nan)


def inspect(name: str, **overrides: Any) -> Inspection:
    return Inspection(tiny(name, **overrides), IMAGE)


@pytest.mark.parametrize("overrides", [{}, {"psi": "dense"}, {"spatial": "sasa"}, {"spatial": "simple_asc"}])
@pytest.mark.parametrize("pixel", [(3, 4), (0, 7)])
def test_a_planar_pixel(overrides: dict[str, str], pixel: tuple[int, int]) -> None:
    view = inspect("resnet29_asc", **overrides).look(LAYER, pixel, 1)
    figure = pixel_figure(IMAGE, view, channel=0)
    assert_readable(figure)
    image, *rest = panels(figure)
    assert shown(image).shape == (8, 8, 3)
    seen = (1 * 2 + 0) if view.dense else 0
    psi, effective = (f[0, 0, 0, seen] if view.dense else f[0, 0, 0] for f in (view.psi, view.effective))
    expected = [view.neighbourhood[0, seen], psi, view.alpha[0], effective, view.positional[0, 0]]
    for axes, values in zip(rest, expected, strict=True):
        np.testing.assert_allclose(shown(axes), values.numpy(), atol=1e-7)
    assert f"{float(view.output[0, 0]):.3f}".replace("-", "−") in figure.get_suptitle()


@pytest.mark.parametrize("name", ["p4resnet29_asc", "p4mresnet29_asc", "p4resnet29_simple_asc"])
def test_a_pixel_on_a_group_has_a_row_for_each_plane(name: str) -> None:
    view = inspect(name).look(LAYER, (2, 5), 0)
    order = len(view.group)
    figure = pixel_figure(IMAGE, view, channel=1)
    assert_readable(figure)
    drawn = panels(figure)
    assert len(drawn) == (1 + order) + order * (order + 2)
    for p in range(order):
        alpha, *filters = drawn[1 + order + p * (order + 2) :][: order + 2]
        np.testing.assert_allclose(shown(alpha), view.alpha[p].numpy(), atol=1e-7)
        for r in range(order):
            np.testing.assert_allclose(shown(filters[r]), view.effective[p, r, 1].numpy(), atol=1e-7)
        np.testing.assert_allclose(shown(filters[order]), view.positional[p, 1].numpy(), atol=1e-7)
        assert alpha.get_ylabel() == f"P = {view.group.element_names[p]}"


def test_the_strongest_channel_is_shown_by_default() -> None:
    view = inspect("resnet29_asc").look(LAYER, (2, 5), 0)
    strongest = int(view.effective.abs().sum((0, 1, 3, 4)).argmax())
    default, chosen = (pixel_figure(IMAGE, view, channel) for channel in (None, strongest))
    assert np.array_equal(shown(panels(default)[4]), shown(panels(chosen)[4]))
    with pytest.raises(ValueError, match="channel: expected 0 to 1 of the head; got 2"):
        pixel_figure(IMAGE, view, 2)


def test_the_schematic_adds_up() -> None:
    view = inspect("resnet29_asc").look(LAYER, (2, 5), 0)
    figure = schematic_figure(IMAGE, view, channel=1)
    assert_readable(figure)
    assert len(panels(figure)) == 4 + 4 + 7
    sums = [axes for axes in panels(figure) if axes.get_xlabel()]
    convolution, attention, asc = (float(shown(axes).sum()) for axes in sums)
    v, psi = view.neighbourhood[0, 1], view.psi[0, 0, 1]
    assert convolution == pytest.approx(float((v * psi).sum()), abs=1e-5)
    assert attention == pytest.approx(float((v * view.alpha[0]).sum()), abs=1e-5)
    assert asc == pytest.approx(float(view.output[0, 1]), abs=1e-5)
    for axes, value in zip(sums, (convolution, attention, asc), strict=True):
        assert axes.get_xlabel() == f"Σ = {value:.3f}".replace("-", "−")
    with pytest.raises(ValueError, match="of a planar layer with ψ per channel; got one with group 'p4'"):
        schematic_figure(IMAGE, inspect("p4resnet29_asc").look(LAYER, (0, 0), 0))


@pytest.mark.parametrize("name", ["resnet29_asc", "p4resnet29_asc", "p4mresnet29_asc"])
def test_maps_of_entropy(name: str) -> None:
    inspection = inspect(name)
    entropy = inspection.entropy(LAYER)
    names = inspection.layers[0].layer.group.element_names
    figure = entropy_figure(IMAGE, entropy, LAYER, names)
    assert_readable(figure)
    heads, order = entropy.shape[:2]
    attention = [axes for axes in panels(figure) if axes.images[0].get_cmap().name == "viridis"]
    drawn = [shown(axes) for axes in attention]
    ((low, high),) = {axes.images[0].get_clim() for axes in attention}
    assert low <= entropy.min() <= entropy.max() <= high
    assert high - low == pytest.approx(max(float(entropy.max() - entropy.min()), 0.05), abs=0.05)
    np.testing.assert_allclose(drawn, entropy.transpose(0, 1).flatten(0, 1).numpy(), atol=1e-7)
    assert len(panels(figure)) == order * (heads + 1)


def test_the_equivariance_of_two_models() -> None:
    models = {"planar": tiny("resnet29_asc"), "p4": tiny("p4resnet29_asc")}
    models["a-folder-of-a-run-whose-name-is-long"] = models["p4"]
    views = {name: equivariance_view(model, IMAGE, LAYER) for name, model in models.items()}
    images = [IMAGE.rot90(s, (-2, -1)) for s in range(4)]
    labels = {name: ["“cat” 99.9%"] * 4 for name in models}
    figure = equivariance_figure(images, views, labels)
    assert_readable(figure)
    drawn = panels(figure)
    assert len(drawn) == 4 + 3 * 5  # the images; for each model its maps and one map of errors
    for row, name in enumerate(views):
        errors = drawn[4 + 5 * row + 4]
        assert errors.get_xlabel() == f"largest error {max(views[name].errors):.0e}"
        largest = 10 ** float(shown(errors).max())
        assert largest == pytest.approx(max(views[name].errors), rel=1e-5)  # the number is of what is drawn
        assert (largest > 0.01) if name == "planar" else (largest < 1e-5)
    assert "planar: no; p4: yes, up to rounding" in figure.get_supxlabel()
    for s in range(4):  # maps of the p4 model are the first one, turned
        np.testing.assert_allclose(shown(drawn[9 + s]), np.rot90(shown(drawn[9]), s), atol=1e-5)
    with pytest.raises(ValueError, match="expected views of one group; got p4, p4m"):
        equivariance_figure(images, views | {"x": equivariance_view(models["planar"], IMAGE, LAYER, "p4m")})


@pytest.mark.parametrize("group", ["c8", "d8"])
def test_the_equivariance_between_the_pixels(group: str) -> None:
    """The number is the root mean square of the picture: inside the disc, in units of the map's deviation."""
    view = equivariance_view(tiny("p4resnet29_asc", group=group), IMAGE, LAYER)
    images = [view.group.act_planar(IMAGE, s) for s in view.group]
    figure = equivariance_figure(images, {group: view})
    assert_readable(figure)
    drawn = panels(figure)
    assert len(drawn) == 8 + 8 + 1  # of 16 elements every other one
    worst = view.errors.index(max(view.errors))
    assert not view.group.exact[worst]
    assert drawn[-1].get_xlabel() == f"rms error {max(view.errors):.2g}\nat {view.group.element_names[worst]}"
    picture = 10 ** shown(drawn[-1])
    inside = np.isfinite(picture)
    assert inside.tolist() == (round_mask(8, 8) > 0).tolist()
    assert np.sqrt(np.mean(picture[inside] ** 2)) == pytest.approx(max(view.errors), rel=1e-5)
    turned, expected = (maps[worst].double().numpy()[..., inside] for maps in (view.maps, view.steered))
    deviation = np.sqrt(np.mean((expected - expected.mean((1, 2), keepdims=True)) ** 2))
    apart = np.sqrt(np.mean((turned - expected) ** 2, (0, 1))) / deviation
    np.testing.assert_allclose(picture[inside], apart, rtol=1e-4)
    assert "yes, up to rounding at multiples of 90°; between, off by" in figure.get_supxlabel()
    longest = max(
        (s for s in view.group if not view.group.exact[s]), key=lambda s: len(view.group.element_names[s])
    )
    errors = [max(view.errors) + (s == longest) for s in view.group]  # which one is worst depends on rounding
    assert_readable(equivariance_figure(images, {group: replace(view, errors=errors)}))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("resnet29_asc", {}), ("resnet29_asc", {"psi": "dense"}), ("p4resnet29_asc", {}),
     ("p4resnet29_asc", {"psi": "dense"}), ("p4mresnet29_asc", {}), ("resnet29_sasa", {})],
)  # fmt: skip
def test_the_filters_of_a_layer(name: str, overrides: dict[str, str]) -> None:
    layer = inspect(name, **overrides).layers[-1].layer
    filters = layer_filters(layer)
    figure = filters_figure(filters, layer.num_heads, "the last layer")
    assert_readable(figure)
    for axes, part in zip(panels(figure), filters, strict=True):
        cells = shown(axes)
        cells = cells[np.isfinite(cells)]
        assert cells.size == part.numel()  # every number is there, once
        np.testing.assert_allclose(np.sort(cells), np.sort(part.numpy().ravel()), atol=1e-7)


@pytest.mark.parametrize(("name", "count"), [("resnet29_asc", 5), ("p4resnet29_asc", 3)])
@pytest.mark.parametrize("psi", ["channel", "dense"])
def test_one_template_and_its_filters(name: str, count: int, psi: str) -> None:
    inspection = inspect(name, psi=psi)
    places, head = choose_pixels(inspection, LAYER, count)
    assert len(set(places)) == count
    views = [inspection.look(LAYER, place, head) for place in places]
    figure = template_figure(IMAGE, views, channel=1)
    assert_readable(figure)
    _, template, *rest = panels(figure)
    own = [
        f[0, 0, 1] if psi == "channel" else f[0, 0, 1, 2 * head + 1]
        for f in (views[0].psi, views[0].effective)
    ]
    np.testing.assert_allclose(shown(template), own[0].numpy(), atol=1e-7)
    np.testing.assert_allclose(shown(rest[count]), views[0].alpha[0].numpy(), atol=1e-7)
    np.testing.assert_allclose(shown(rest[2 * count]), own[1].numpy(), atol=1e-7)
    with pytest.raises(ValueError, match="expected 1 to 9 views of one layer and head; got 0"):
        template_figure(IMAGE, [])


def test_an_explanation_shows_the_answer_and_its_runner_up() -> None:
    activation, occlusion = torch.randn(3, 4, 4), torch.randn(3, 8, 8)
    logits = activation.sum((1, 2))
    best, second, _ = logits.argsort(descending=True).tolist()
    names = ["cat", "a-class-with-a-long-name", "dog"]
    figure = explanation_figure(IMAGE, activation, occlusion, names, truth="dog")
    assert_readable(figure)
    drawn = [axes for axes in panels(figure) if len(axes.images) == 2]  # the image, and a map over it
    assert len(drawn) == 6
    for axes, value in zip(
        drawn[::2], (logits[best], logits[second], logits[best] - logits[second]), strict=True
    ):
        assert f"sum {float(value):.2f}".replace("-", "−") in axes.get_xlabel()
        cells = [float(text.get_text().replace("−", "-")) for text in axes.texts]
        assert sum(cells) == pytest.approx(float(value), abs=16 * 0.005)
    assert "the true class is “dog”" in figure.get_suptitle()
    difference = activation[best] - activation[second]
    conclusion = " ".join(figure.get_supxlabel().split())
    for value in (difference.max(), difference.min(), difference.sum()):
        assert f"{float(value):.2f}".replace("-", "−") in conclusion


def test_captions_follow_the_data() -> None:
    """Where attention is even and the image uniform, no caption says that filters or rows differ."""
    model = tiny("p4resnet29_asc")
    parameters = dict(model.get_submodule(LAYER).named_parameters())
    with torch.no_grad():
        for name in ("psi_k", "beta_k"):
            parameters[name].zero_()
    even = Inspection(model, torch.full_like(IMAGE, 0.5))
    places, head = choose_pixels(even, LAYER, 5)
    assert len(set(places)) == 5
    figure = template_figure(IMAGE, [even.look(LAYER, place, head) for place in places])
    assert figure.get_suptitle() == "One template, five pixels, nearly equal filters"
    assert "the filters differ" not in conclusion(figure)
    said = conclusion(pixel_figure(IMAGE, even.look(LAYER, (4, 4), 0)))
    assert "The rows are the first one, turned: the image has no direction here." in said
    assert "no head chooses" in conclusion(entropy_figure(IMAGE, even.entropy(LAYER), LAYER, list("1234")))
    view = even.look(LAYER, (4, 4), 0)
    uneven = torch.rand(view.alpha.shape, generator=torch.Generator().manual_seed(0))
    said = conclusion(pixel_figure(IMAGE, replace(view, alpha=uneven)))
    assert "the image has a direction here" in said
    planar = inspect("resnet29_asc").look(LAYER, (4, 4), 0)
    flat = replace(planar, alpha=torch.full_like(planar.alpha, 1 / planar.alpha[0].numel()))
    assert "The scores are nearly even" in conclusion(pixel_figure(IMAGE, flat))
    nothing = replace(planar, neighbourhood=0 * planar.neighbourhood, beta=0 * planar.beta)
    assert "the three sums are nearly the same" in conclusion(schematic_figure(IMAGE, nothing))


def test_pixels_are_distinct_or_fewer() -> None:
    inspection = Inspection(tiny("resnet29_asc"), torch.full((3, 8, 8), 0.5))
    for info in inspection.layers:
        places, _ = choose_pixels(inspection, info.name, 9)
        assert len(places) == len(set(places)) == min(9, info.size[0] * info.size[1])


def conclusion(figure: Figure) -> str:
    return " ".join(figure.get_supxlabel().split())


def test_an_explanation_says_whether_covering_the_places_it_names_has_their_sign() -> None:
    activation = torch.zeros(2, 4, 4)
    activation[0, 0, 0], activation[0, 3, 3] = 5.0, -2.0
    occlusion = torch.zeros(2, 8, 8)
    occlusion[0, :2, :2], occlusion[0, 6:, 6:] = 1.25, -0.5
    names = ["cat", "dog"]
    said = conclusion(explanation_figure(IMAGE, activation, occlusion, names))
    assert "at the top left (5.00): covering it lowers the difference of the logits by 1.25." in said
    assert "at the bottom right (−2.00): covering it raises the difference of the logits by 0.50." in said
    evidence, falls = activation[0].flatten(), occlusion[0, ::2, ::2].flatten()
    correlation = np.corrcoef(evidence.numpy(), falls.numpy())[0, 1]
    assert f"The correlation of the two maps is {correlation:.2f}." in said
    said = conclusion(explanation_figure(IMAGE, activation, -occlusion, names))
    assert "at the top left (5.00), but covering it raises the difference of the logits by 1.25." in said
    assert "(−2.00), but covering it lowers the difference of the logits by 0.50." in said
    assert f"The correlation of the two maps is −{correlation:.2f}." in said
    occlusion[0, :2, :2] = 0
    said = conclusion(explanation_figure(IMAGE, activation, occlusion, names))
    assert "at the top left (5.00), but covering it changes nothing." in said


def test_rounding_is_not_drawn_as_evidence() -> None:
    """Covering parts of a uniform image changes logits by rounding alone."""
    activation, noise = torch.randn(3, 4, 4) + 1, 1e-6 * torch.randn(3, 8, 8)
    figure = explanation_figure(IMAGE, activation, noise, ["cat", "dog", "cow"])
    drawn = [axes for axes in panels(figure) if len(axes.images) == 2]
    for axes in drawn[1::2]:  # columns: activation, occlusion
        assert shown_opacity(axes).max() < 0.05
    assert shown_opacity(drawn[0]).max() == pytest.approx(0.9)
    said = conclusion(figure)
    assert said.endswith("Covering any part changes nothing.")
    assert "correlation" not in said
    assert "covering it" not in said


def shown_opacity(axes: Axes) -> Any:
    return np.asarray(axes.images[1].get_array())[..., 3]


def test_the_paper_s_largest_layers_are_readable() -> None:
    for name in ("resnet29_asc", "p4resnet29_asc"):
        layer = create_model(name).get_submodule("stages.2.0.spatial.conv")
        assert_readable(filters_figure(layer_filters(layer), 8, "stages.2.0.spatial.conv"))  # type: ignore[arg-type]


# ---- the command ----


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(tiny_config(tiny_data(folder), "p4resnet29_asc", epochs=1), folder / "p4", quiet=True)
    return folder / "p4"


def test_figures_of_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (20, 30), "white").save(tmp_path / "some.png")
    options = ("--image", tmp_path / "some.png", "--layer", "stages.1.0.spatial.conv", "--pixel", "3", "4")
    assert run_cli("figures", run, "--out", tmp_path / "out", *options, "--head", "1") == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    names = [
        f"{n}.{kind}"
        for n in ("pixel", "entropy", "template", "filters", "equivariance", "explanation")
        for kind in ("png", "svg")
    ]
    assert [file.name for file in files] == names
    for file in files:
        if file.suffix == ".png":
            with Image.open(file) as picture:
                assert min(picture.size) > 200
        else:
            assert "<svg" in file.read_text()[:1000]


def test_figures_of_a_file_with_another_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = np.random.default_rng(0).integers(0, 256, (16, 16))
    Image.fromarray(values.astype(np.uint8)).save(tmp_path / "bytes.png")
    np.save(tmp_path / "deep.npy", (values * 16).astype(np.uint16))
    for name, options in (("bytes.png", ()), ("deep.npy", ("--range", "0,4080"))):
        out = tmp_path / name.partition(".")[0]
        assert run_cli("figures", "digits_conv", "--image", tmp_path / name, "--out", out, *options) == 0
    assert (tmp_path / "bytes/explanation.png").read_bytes() == (
        tmp_path / "deep/explanation.png"
    ).read_bytes()
    assert run_cli("figures", "digits_conv", "--image", tmp_path / "deep.npy", "--out", tmp_path / "o") == 2
    assert "--range 0,4095" in capsys.readouterr().err
    assert run_cli("figures", "digits_conv", "--range", "0,1", "--out", tmp_path / "o") == 2
    assert "--range needs --image" in capsys.readouterr().err


def test_figures_without_the_data_of_the_model_ask_for_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli("figures", "resnet29.cifar10", "--out", tmp_path / "out") == 2
    said = "the images of cifar10 are not on this machine; give an image with --image FILE"
    assert capsys.readouterr().err == f"selfconv: resnet29.cifar10: {said}\n"


def test_figures_of_shipped_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("figures", "digits_asc", "--out", tmp_path / "asc") == 0
    assert "schematic.png" in capsys.readouterr().out
    assert run_cli("figures", "digits_conv", "--out", tmp_path / "conv") == 0
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == [
        "equivariance.png",
        "equivariance.svg",
        "explanation.png",
        "explanation.svg",
    ]


def test_the_same_figures_have_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run_cli("figures", "digits_conv", "--out", tmp_path / name) == 0
    for kind in ("png", "svg"):
        a, b = (tmp_path / name / f"equivariance.{kind}" for name in ("a", "b"))
        assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("digits_asc", ["--pixel", "16", "0"], "pixel: expected row 0 to 15 and column 0 to 15 of the 16×16"),
        ("digits_asc", ["--pixel", "a", "0"], "a"),
        ("digits_asc", ["--layer", "fc"], "layer: expected one of stages.0.0.spatial.conv, "),
        ("digits_asc", ["--head", "4"], "head: expected 0 to 3 for stages.0.0.spatial.conv; got 4"),
        ("digits_asc", ["--image", "nowhere.png"], "nowhere.png: "),
        ("digits_conv", ["--pixel", "1", "1"], "digits_conv has no self-convolution layer"),
        ("digits_conv", ["--layer", "fc"], "layer: expected one of stem.conv, "),
        (
            "digits",
            [],
            "digits: expected the folder of a run or of a saved model, or one of digits_asc, ",
        ),
    ],
)
def test_bad_options_are_answered_in_a_line(
    model: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("figures", model, "--out", tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("selfconv: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_cli("figures", "digits_conv", "--out", tmp_path / "out") == 2
    assert "drawing pictures needs matplotlib: pip install 'selfconv[plot]'" in capsys.readouterr().err


# ---- colours and signs ----

VISION = {  # linear RGB as others see it: Machado, Oliveira and Fernandes (2009), complete deficiency
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_XYZ = np.array([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]])


def lab(colours: Any, vision: str) -> np.ndarray:
    """CIE L*a*b* of sRGB colours: distances in it are about as large as they look."""
    given = np.asarray(colours, float)[..., :3]
    linear = np.where(given <= 0.04045, given / 12.92, ((given + 0.055) / 1.055) ** 2.4)
    xyz = np.clip(linear @ np.array(VISION[vision]).T, 0, 1) @ TO_XYZ.T
    x, y, z = np.moveaxis(np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116), -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("shades", [SIGNED, POSITIVE, "gray"])
def test_the_mark_of_a_pixel_looks_like_no_value(vision: str, shades: str) -> None:
    """In figures and on the page, to colour-blind people too; 2 is the least difference that one sees."""
    css = (files("selfconv.explorer") / "static" / "page.css").read_text()
    found = re.search(r"--frame: (#[0-9a-f]{6});", css)
    assert found
    assert found[1] == FRAME.lower()
    values = lab(matplotlib.colormaps[shades](np.linspace(0, 1, 101)), vision)
    assert np.linalg.norm(values - lab(to_rgb(FRAME), vision), axis=-1).min() > 12


def test_the_equation_has_its_operators() -> None:
    view = Inspection(tiny("resnet29_asc"), IMAGE).look(LAYER, (2, 3), 1)
    pixel, schematic = pixel_figure(IMAGE, view), schematic_figure(IMAGE, view)
    assert signs(pixel) == ["Σ", "× (", "×", "=", ") + Σ"]
    assert signs(schematic) == ["×", "=", "×", "=", "×", "+", "=", "×", "="]
    for figure in (pixel, schematic):
        assert_readable(figure)


def signs(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts if text.get_text()]
