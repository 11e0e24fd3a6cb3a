"""The server of the page: who may ask it for what, and how it starts and ends."""

from __future__ import annotations

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
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from selfconv._extras import require
from selfconv.explorer._uploads import MAX_BYTES, Uploads

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Callable[[], Awaitable[Message]], Send], Awaitable[None]]

# What the page needs. Everything else that gradio would answer (files, proxies, its API) is not there.
PATHS = re.compile(
    r"/|/(config|theme\.css|favicon\.ico|manifest\.json)|/(assets|static)/[\w./-]+"
    r"|/gradio_api/(upload|upload_progress|run/predict|heartbeat/\w+)"
)
UPLOAD = "/gradio_api/upload"
HOST = re.compile(r"\[(?P<address>[0-9A-Fa-f:.]+)\](:\d{1,5})?|(?P<name>[\w.-]+)(:\d{1,5})?", re.ASCII)
ORIGIN = re.compile(rf"null|[A-Za-z][A-Za-z0-9+.-]*://(?P<host>{HOST.pattern})", re.ASCII)
MAX_CALL = 2**20  # bytes of a request that is no upload

HEADERS = {
    # gradio compiles its templates in the browser (hence eval) and styles elements in place; but whatever
    # runs there can reach this server alone
    "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """Lets through to an app only what the page needs, and only from the page itself.

    Args:
        hosts: names under which the server may be asked; None for any. On loopback this keeps other sites
            from reaching it under a name of theirs.
        max_upload: bytes of a file.
        uploads: where they are kept.
    """

    def __init__(self, app: App, *, hosts: set[str] | None, max_upload: int, uploads: Uploads) -> None:
        self.app, self.hosts, self.uploads = app, hosts, uploads
        self.limits = {UPLOAD: max_upload + 2**16}  # and the form around it

    async def __call__(self, scope: Scope, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None  # the page uses no websockets
        refusal = self._refusal(scope)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        if refusal is None and scope["method"] == "POST":
            return await self._post(scope, receive, with_headers)
        if refusal is None:
            return await self.app(scope, receive, with_headers)
        status, reason = refusal
        plain = [(b"content-type", b"text/plain; charset=utf-8")]
        await with_headers({"type": "http.response.start", "status": status, "headers": plain})
        return await send({"type": "http.response.body", "body": reason.encode()})

    async def _post(self, scope: Scope, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        """Follows what becomes of an upload."""
        asked, answer = bytearray(), bytearray()

        async def recorded() -> Message:
            message = await receive()
            if scope["path"] != UPLOAD:
                asked.extend(message.get("body", b""))
            return message

        async def noted(message: Message) -> None:
            if scope["path"] == UPLOAD and len(answer) < MAX_CALL:
                answer.extend(message.get("body", b""))
            await send(message)

        with self.uploads.request():
            try:
                await self.app(scope, recorded, noted)
            finally:
                if scope["path"] == UPLOAD:
                    self.uploads.arrived(bytes(answer))
                else:
                    self.uploads.answered(bytes(asked))

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        names = [name for name, _ in scope["headers"]]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"]
        host = HOST.fullmatch(headers.get("host", ""))
        origin = ORIGIN.fullmatch(headers.get("origin", "null"))
        if host is None or names.count(b"host") > 1:
            return 400, "expected a name or address as the host"
        if origin is None or names.count(b"origin") > 1:
            return 400, "expected scheme://host as the origin"
        if self.hosts is not None and (host["address"] or host["name"]).lower() not in self.hosts:
            return 403, "this page is for the machine it runs on"
        if "origin" in headers and origin["host"] != host[0]:
            return 403, "this page takes requests from itself alone"
        if not PATHS.fullmatch(path) or ".." in path:
            return 404, "not here"
        if scope["method"] == "POST":
            length = headers.get("content-length", "")
            if not length.isdecimal():
                return 411, "expected a content-length"
            if len(length) > 20 or int(length) > self.limits.get(path, MAX_CALL):
                return 413, "too large"
        return None


def explore(
    run: str | Path | None = None, *, host: str = "127.0.0.1", port: int = 7860, open_page: bool = True
) -> None:
    """Serves the page until Ctrl-C.

    Args:
        run: a trained model, as ``open_trained`` takes it; without one, the models that are shipped.
        host: address to listen on. Any other than loopback lets others in.
        port: 0 takes any that is free.
        open_page: show it in the browser.

    Raises:
        ModuleNotFoundError: gradio is missing.
        ValueError: the model cannot be used, or the port is taken.
    """
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="selfconv-explore-") as uploads:
        # all three are read when gradio and the hub's library are imported
        os.environ |= {
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_TEMP_DIR": uploads,
            "HF_HUB_OFFLINE": "1",
        }
        require("explore", "gradio")
        with _listen(host, port) as listening:
            _serve(run, host, listening, open_page, Path(uploads))


def _serve(
    run: str | Path | None, host: str, listening: socket.socket, open_page: bool, uploads: Path
) -> None:
    import uvicorn

    port = listening.getsockname()[1]
    local = _is_loopback(host)
    if not local:
        warnings.warn(f"--host {host}: everybody who can reach this machine can use the page", stacklevel=2)
    app = make_app(run, host, port, {host, "127.0.0.1", "localhost", "::1"} if local else None, uploads)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}"
    print(f"The page is at {address} (Ctrl-C ends it).", flush=True)
    if open_page and _has_display():
        threading.Timer(0.5, webbrowser.open, [address]).start()

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            logging.getLogger("uvicorn.error").disabled = True  # pages still open are cut off: no error
            await super().shutdown(sockets)

    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=0)
    try:
        Server(config).run([listening])
    except KeyboardInterrupt:
        print()


def make_app(run: str | Path | None, host: str, port: int, hosts: set[str] | None, uploads: Path) -> Guard:
    """The page behind its guard; ``uploads`` is the folder that gradio puts them into."""
    import fastapi

    from selfconv.explorer._comparison import Comparison
    from selfconv.explorer._page import build_page, mount

    fetch_nothing()
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    mount(build_page(Comparison.open(run)), app, host, port)
    return Guard(app, hosts=hosts, max_upload=MAX_BYTES, uploads=Uploads(uploads))


def fetch_nothing() -> None:
    """A request may name the address of a file instead of sending one; gradio would fetch it."""
    from gradio import processing_utils

    async def refuse(url: str, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(f"expected an uploaded file; got the address {url[:100]!r}")

    processing_utils.async_ssrf_protected_get = refuse


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
        listening.listen()
    except OSError as error:
        listening.close()
        raise ValueError(
            f"cannot listen on {host}, port {port} ({error.strerror}); give another --port, 0 for any"
        ) from None
    return listening


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _has_display() -> bool:
    """Whether opening a page would not start a browser in this terminal."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """The signal raises an exception, so that the uploads are deleted."""

    def end(*_: object) -> NoReturn:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
