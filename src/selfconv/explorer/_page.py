"""The page: its controls, and what each of them changes."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from selfconv.data import DataError
from selfconv.explorer import _pictures as pictures
from selfconv.explorer._comparison import Comparison, Image, Place, turn_place, wrap
from selfconv.explorer._explained import EXPLANATIONS
from selfconv.explorer._style import CSS, SAMPLES_JS, STAGE_JS
from selfconv.explorer._uploads import MAX_BYTES
from selfconv.explorer._view import View

# answered at once, not in gradio's queue, which looks every 50 ms for something to do
QUIETLY: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
FONT, MONO = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]  # the reader's own: nothing to fetch


def build_page(comparison: Comparison) -> gr.Blocks:
    """The whole page for some models. What one user does is kept in that user's session."""
    view = View(comparison)
    first = comparison.samples[0].image
    start = (first, (first.shape[1] // 2,) * 2, 0, 0, 0, 0)  # its middle, upright
    with gr.Blocks(title="selfconv explore", analytics_enabled=False) as page:
        gr.HTML(view.title(), elem_classes="sc-title")
        with gr.Tabs():
            with gr.Tab("Explore"):
                _explore_tab(view, start)
            with gr.Tab("Curves"):
                gr.HTML(view.curves())
            with gr.Tab("Explained"):
                gr.Markdown(EXPLANATIONS)
        page.load(lambda: None, **QUIETLY)  # gradio's first answer is slow: let it not be that to a click
    return page


def _explore_tab(view: View, start: tuple[Any, ...]) -> None:
    image, home = gr.State(start[0]), gr.State(start[1])
    with gr.Row():
        with gr.Column(scale=4, min_width=260, elem_classes="sc-left"):
            samples = gr.HTML(pictures.strip(view.comparison.samples, 0), js_on_load=SAMPLES_JS)
            message = gr.HTML(view.note())
            stage = gr.HTML(view.stage(*start[:4]), js_on_load=STAGE_JS, elem_id="stage")
            with gr.Row():
                left = gr.Button("↺ 90°", size="sm", min_width=60)
                upright = gr.Button("Upright", size="sm", min_width=60)
                right = gr.Button("↻ 90°", size="sm", min_width=60)
            angle = gr.Slider(-180, 180, 0, step=1, label="Turn, degrees counter-clockwise", buttons=[])
            upload = gr.UploadButton("Upload an image", file_types=["image"], size="sm", elem_id="upload")
        with gr.Column(scale=8, min_width=280):
            predictions = gr.HTML(view.predictions(start[0], 0), elem_id="predictions")
            gr.HTML('<h2 class="sc-heading">Filters at the pixel</h2>')
            with gr.Row():
                layer = gr.Dropdown(view.layer_choices(), value=0, label="Layer", min_width=290, scale=3)
                head = gr.Dropdown(view.head_choices(), value=0, label="Head", min_width=90, scale=1)
                channel = gr.Dropdown(
                    view.channel_choices(0), value=0, label="Channel", min_width=90, scale=1
                )
            filters = gr.HTML(view.filters(*start), elem_id="filters")
            maps = gr.HTML(view.maps(start[0], *start[2:]), elem_id="maps")

    choices = [image, home, angle, layer, head, channel]
    everything = [stage, predictions, filters, maps]

    def on(event: Callable[..., Any], act: Callable[..., Any], inputs: list[Any], outputs: list[Any]) -> None:
        event(act, inputs, outputs, trigger_mode="always_last", **QUIETLY)

    def show_sample(old: Image, layer: int, head: int, channel: int, event: gr.EventData) -> list[Any]:
        number = int(event.sample)
        new = view.comparison.samples[number].image if 0 <= number < len(view.comparison.samples) else old
        return [new, start[1], 0, view.note(), *view.everything(new, start[1], 0, layer, head, channel)]

    def show_upload(
        file: str, old: Image, home: Place, angle: float, layer: int, head: int, channel: int
    ) -> list[Any]:
        try:
            new = view.read(Path(file))
        except DataError as error:
            shown = f'<p class="sc-error" role="alert">{escape(str(error))}</p>'
            return [old, home, angle, shown, *[gr.skip()] * (len(everything) + 1)]
        finally:
            Path(file).unlink(missing_ok=True)
        strip = pictures.strip(view.comparison.samples, None)
        shown = (
            f'<p class="sc-note" role="status">{escape(Path(file).name)}, {new.shape[1]}×{new.shape[2]}</p>'
        )
        rest = view.everything(new, start[1], 0, layer, head, channel)
        return [new, start[1], 0, shown, *rest, strip]

    def show_pixel(
        image: Image, angle: float, layer: int, head: int, channel: int, event: gr.EventData
    ) -> list[Any]:
        home = turn_place((float(event.row), float(event.column)), -angle, image.shape[1])
        return [home, view.filters(image, home, angle, layer, head, channel)]

    def show_turn(by: int | None) -> Callable[..., list[Any]]:
        def show(image: Image, home: Place, angle: float, *rest: int) -> list[Any]:
            new = 0.0 if by is None else wrap(angle + by)
            return [new, *view.everything(image, home, new, *rest)]

        return show

    def show_layer(image: Image, home: Place, angle: float, layer: int, head: int, channel: int) -> list[Any]:
        numbers = view.channel_choices(layer)
        channel = min(channel, len(numbers) - 1)
        return [
            gr.update(choices=numbers, value=channel),
            view.stage(image, home, angle, layer),
            view.filters(image, home, angle, layer, head, channel),
            view.maps(image, angle, layer, head, channel),
        ]

    def show_channel(image: Image, home: Place, angle: float, *rest: int) -> list[Any]:
        return [view.filters(image, home, angle, *rest), view.maps(image, angle, *rest)]

    on(samples.select, show_sample, [image, *choices[3:]], [image, home, angle, message, *everything])
    on(upload.upload, show_upload, [upload, *choices], [image, home, angle, message, *everything, samples])
    on(stage.select, show_pixel, [image, *choices[2:]], [home, filters])
    on(angle.input, view.everything, choices, everything)
    for button, by in ((left, 90), (upright, None), (right, -90)):
        on(button.click, show_turn(by), choices, [angle, *everything])
    on(layer.input, show_layer, choices, [channel, stage, filters, maps])
    for control in (head, channel):
        on(control.input, show_channel, choices, [filters, maps])


def mount(page: gr.Blocks, app: Any, host: str, port: int) -> None:
    """Puts the page at the root of a FastAPI app."""
    theme = gr.themes.Default(font=FONT, font_mono=MONO)
    page.has_launched = True  # else gradio takes a request's word that a file of this machine is an upload
    gr.mount_gradio_app(
        app,
        page,
        path="/",
        server_name=host,
        server_port=port,
        footer_links=[],
        run_history=False,
        allowed_paths=[],
        show_error=True,
        max_file_size=MAX_BYTES,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        theme=theme,
        css=CSS,
    )
