"""The server of the page: the checks of requests, the endpoints, start and shutdown."""

from __future__ import annotations

import asyncio
import atexit
import errno
import gc
import ipaddress
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import warnings
import webbrowser
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from selfconv._extras import require
from selfconv._files import parse_json
from selfconv.data import DataError, PixelRange, as_bytes, read_image
from selfconv.explorer._answers import MAX_UPLOAD, Answers, encode_image
from selfconv.explorer._comparison import Comparison
from selfconv.trained import given_range

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Callable[[], Awaitable[Message]], Send], Awaitable[None]]

HOST = re.compile(r"\[(?P<address>[0-9A-Fa-f:.]+)\](:\d{1,5})?|(?P<name>[\w.-]+)(:\d{1,5})?", re.ASCII)
ORIGIN = re.compile(rf"null|[A-Za-z][A-Za-z0-9+.-]*://(?P<host>{HOST.pattern})", re.ASCII)
MAX_PIXELS = 40_000_000  # of an uploaded image: fewer than of one's own files
MAX_SECONDS = 30.0  # until the body of a request has arrived
MAX_CONNECTIONS = 32  # a browser opens six; each may hold an upload in memory
ONE_THREAD = 64  # up to this side of the images, one thread is fastest
UPLOAD = "/api/upload"
STATIC = {  # the only files that are served, read once
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/draw.js": ("draw.js", "text/javascript"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Refused(Exception):
    """A request that is answered with a status and a line."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Urgent:
    """Counts running user requests; background work calls ``let_pass()`` to wait until there are none."""

    def __init__(self) -> None:
        self._changed, self._count = threading.Condition(), 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def let_pass(self, seconds: float = 1.0) -> None:
        """Returns when nothing is urgent, or after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count, seconds)


class Guard:
    """Lets through to an app only requests of the page itself, of a bounded size, that arrive in time.

    Args:
        hosts: accepted names in the Host header; None for any. On loopback this prevents DNS rebinding.
        max_call: bytes of a request that is no upload.
        max_seconds: until the whole body of a request is there.
    """

    def __init__(
        self, app: App, *, hosts: set[str] | None, max_call: int, max_seconds: float = MAX_SECONDS
    ) -> None:
        self.app, self.hosts, self.max_call, self.max_seconds = app, hosts, max_call, max_seconds

    async def __call__(self, scope: Scope, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None  # the page uses no websockets
        received, limit = 0, self.limit(scope["path"])
        end = asyncio.get_running_loop().time() + self.max_seconds

        async def bounded() -> Message:
            nonlocal received
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise Refused(
                    408, f"expected the whole request within {self.max_seconds:g} seconds"
                ) from None
            received += len(message.get("body", b""))
            if received > limit:  # whatever its header said
                raise Refused(413, "too large")
            return message

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        try:
            self.check(scope)
            return await self.app(scope, bounded, with_headers)
        except Refused as refused:
            plain = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
            await with_headers({"type": "http.response.start", "status": refused.status, "headers": plain})
            return await send({"type": "http.response.body", "body": str(refused).encode()})

    def limit(self, path: str) -> int:
        return MAX_UPLOAD if path == UPLOAD else self.max_call

    def check(self, scope: Scope) -> None:
        names = [name for name, _ in scope["headers"]]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = HOST.fullmatch(headers.get("host", ""))
        origin = ORIGIN.fullmatch(headers.get("origin", "null"))
        if host is None or names.count(b"host") > 1:
            raise Refused(400, "expected a name or address as the host")
        if origin is None or names.count(b"origin") > 1:
            raise Refused(400, "expected scheme://host as the origin")
        if self.hosts is not None and (host["address"] or host["name"]).lower() not in self.hosts:
            raise Refused(403, "host not allowed: open the page on the machine that serves it")
        if "origin" in headers and origin["host"] != host[0]:
            raise Refused(403, "cross-origin request refused")
        if scope["method"] == "POST":
            length = headers.get("content-length", "")
            chunked = b"transfer-encoding" in names
            if chunked or names.count(b"content-length") != 1 or not re.fullmatch(r"[0-9]+", length):
                raise Refused(411, "expected a content-length")
            if len(length) > 20 or int(length) > self.limit(scope["path"]):
                raise Refused(413, "too large")


def read_upload(content: bytes, size: int, channels: int, pixels: PixelRange | None = None) -> Any:
    """An uploaded file as uint8 ``[channels, size, size]``: the shorter side resized, the centre cut out.

    It is in a file only while it is read. ``pixels``: the range of the training images, by default of bytes.

    Raises:
        DataError: not an image, too large, or damaged.
    """
    suffix = ".npy" if content.startswith(b"\x93NUMPY") else ""  # other formats are known by their content
    with tempfile.NamedTemporaryFile(prefix="selfconv-explore-", suffix=suffix) as file:
        file.write(content)
        file.flush()
        try:
            image = read_image(file.name, size, channels, pixels=pixels, max_pixels=MAX_PIXELS)
            return as_bytes(image.numpy(), 255 if pixels is None else pixels.levels)
        except DataError as error:
            raise DataError(str(error).removeprefix(f"{file.name}: ")) from None


def make_app(answers: Answers, pixel_range: PixelRange | None = None) -> Starlette:
    """The page: its files, and an endpoint for each interaction.

    One thread answers user actions; another computes background results (occlusion, the curve of angles),
    and pauses while the first computes.

    Args:
        pixel_range: of uploads; by default that of the training images.
    """
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    click = ThreadPoolExecutor(1, "click")  # a model is observed by hooks, so one image at a time
    later = ThreadPoolExecutor(1, "later")
    urgent = Urgent()
    answers.comparison.pause = urgent.let_pass
    folder = files("selfconv.explorer") / "static"

    async def computed(call: Callable[[], Any], thread: ThreadPoolExecutor = click) -> Response:
        try:
            with urgent() if thread is click else nullcontext():
                found = await asyncio.get_running_loop().run_in_executor(thread, call)
        except (DataError, ValueError) as error:
            raise Refused(400, str(error)) from None
        return JSONResponse(found)

    async def whole_body(request: Request) -> bytes:
        try:
            return await request.body()
        except ClientDisconnect:  # nobody reads the answer: no error
            raise Refused(400, "expected the whole request; the connection was closed") from None

    def file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
        content = (folder / name).read_bytes()

        async def serve(_: Request) -> Response:
            return Response(content, media_type=kind)

        return serve

    def once(
        call: Callable[[], Any], thread: ThreadPoolExecutor = click
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(_: Request) -> Response:
            return await computed(call, thread)

        return answer

    def about(
        call: Callable[[Any], Any], thread: ThreadPoolExecutor = click
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body = await whole_body(request)
            return await computed(lambda: call(answers.choice(parse_json(body))), thread)

        return answer

    async def upload(request: Request) -> Response:
        content = await whole_body(request)
        data = answers.data
        given = data.pixels if pixel_range is None else pixel_range
        return await computed(
            lambda: {
                "image": encode_image(read_upload(content, data.size, data.in_channels, given)),
                "size": data.size,
            },
            later,
        )

    async def refuse(_: Request, refused: Any) -> Response:
        return Response(str(refused), refused.status, media_type="text/plain")

    return Starlette(
        exception_handlers={Refused: refuse},
        routes=[
            *(Route(path, file(*what)) for path, what in STATIC.items()),
            Route("/api/start", once(answers.start)),
            Route("/api/training", once(answers.training, later)),
            Route("/api/look", about(answers.look), methods=["POST"]),
            Route("/api/pixel", about(answers.pixel), methods=["POST"]),
            Route("/api/answer", about(answers.answer, later), methods=["POST"]),
            Route("/api/occlusion", about(answers.occlusion, later), methods=["POST"]),
            Route(UPLOAD, upload, methods=["POST"]),
        ],
    )


def explore(
    *places: str | Path,
    host: str = "127.0.0.1",
    port: int = 7860,
    open_page: bool = True,
    pixel_range: str | None = None,
) -> None:
    """Serves the page until Ctrl-C.

    Args:
        places: trained models, as ``open_trained`` takes them; without any, those that are shipped.
        host: address to listen on. Any other than loopback lets others in.
        port: 0 takes any that is free.
        open_page: show it in the browser.
        pixel_range: of uploads, ``"dtype"`` or ``"LOW,HIGH"``; by default that of the training images.

    Raises:
        ModuleNotFoundError: starlette or uvicorn is missing.
        ValueError: a model cannot be used, or the port is taken.
    """
    require("explore", "starlette", "uvicorn")
    with _ended_by_sigterm(), _listen(host, port) as listening:
        given = None if pixel_range is None else given_range(pixel_range)
        _serve(places, host, listening, open_page, given)


def open_guarded(
    places: Sequence[str | Path], hosts: set[str] | None, pixel_range: PixelRange | None = None
) -> Guard:
    """The app for some models, behind its guard."""
    answers = Answers(Comparison.open(*places))
    if answers.data.size <= ONE_THREAD:
        torch.set_num_threads(1)
    answers.start()  # compiles kernels, if they are not yet
    return Guard(make_app(answers, pixel_range), hosts=hosts, max_call=answers.largest_call)


def _serve(
    places: Sequence[str | Path],
    host: str,
    listening: socket.socket,
    open_page: bool,
    pixel_range: PixelRange | None,
) -> None:
    import uvicorn

    port = listening.getsockname()[1]
    local = _is_loopback(host)
    if not local:
        warnings.warn(f"--host {host}: everybody who can reach this machine can use the page", stacklevel=2)
    print("selfconv: loading the models; kernels are compiled when first used", file=sys.stderr, flush=True)
    app = open_guarded(places, {host, "127.0.0.1", "localhost", "::1"} if local else None, pixel_range)
    _start_listening(listening, host, port)
    every = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # all addresses of the machine
    shown = every.get(host, host)
    address = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    others = ", for others at the name of this machine" if host in every else ""
    print(f"The page is at {address}{others} (Ctrl-C ends it).", flush=True)
    if open_page and _has_display():
        threading.Timer(0.5, webbrowser.open, [address]).start()

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            logging.getLogger("uvicorn.error").disabled = True  # pages still open are cut off: no error
            await super().shutdown(sockets)

    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not a line for each request that is refused
    config = uvicorn.Config(
        app,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=0,
        http="h11",
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
    )
    atexit.register(gc.freeze)  # or the end of the process searches all of torch's objects for garbage
    try:
        Server(config).run([listening])
    except KeyboardInterrupt:
        print()


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ValueError(f"port: expected 0 to 65535; got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(
            f"host: expected an address of this machine; got {host!r} ({error.strerror})"
        ) from None
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise _refused(host, port, error) from None
    return listening


def _start_listening(listening: socket.socket, host: str, port: int) -> None:
    """Called after the models are loaded: an earlier listen() would leave browsers waiting."""
    try:
        listening.listen()
    except OSError as error:  # another process was faster
        raise _refused(host, port, error) from None


def _refused(host: str, port: int, error: OSError) -> ValueError:
    if error.errno == errno.EADDRNOTAVAIL:
        return ValueError(f"host: expected an address of this machine; got {host!r} ({error.strerror})")
    return ValueError(
        f"cannot listen on {host}, port {port} ({error.strerror}); give another --port, 0 for any"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _has_display() -> bool:
    """Whether a graphical browser can be opened."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """The signal raises an exception, so that what is in use is closed."""

    def end(*_: object) -> NoReturn:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
