"""The web pages of the service, all on `--health-port`: how it is doing, and the live list of what it has scored.

``/healthz``, ``/readyz`` and ``/metrics`` (Prometheus text) name no film.

The live list holds results and small pictures of the newest films, in memory only. A film is named by the time and by
the keyed hash that the audit log uses. Only browsers on this machine get an answer, and only for our own page: pages of
other sites that the same browser shows are refused. No request changes anything.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from threading import Lock, Thread
from urllib.parse import parse_qs, urlsplit

from afire.detect.base import AnomalyDetector
from afire.detect.findings import FilmResult, Rule
from afire.detect.run import Drawing
from afire.errors import UserError
from afire.report.detect_page import (
    LiveFilm,
    live_near,
    live_normals,
    live_page,
    live_picture,
    live_script,
    page_policy,
)
from afire.report.detect_pictures import heat_levels


@dataclass(frozen=True)
class Health:
    """One look at the service."""

    alive: bool
    ready: bool
    reasons: tuple[str, ...] = ()  # why it is not ready
    waiting: Mapping[str, int] = field(default_factory=dict)  # films and results in each state of the spool
    events: Mapping[str, int] = field(default_factory=dict)
    free_bytes: int = 0


class HealthServer:
    """Answers until it is closed."""

    def __init__(self, host: str, port: int, look: Callable[[], Health], live: LiveList | None = None) -> None:
        handler = type("Handler", (_Handler,), {"look": staticmethod(look), "live": live})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise UserError(
                f"cannot listen on {host} port {port} ({error.strerror}); choose another --health-port."
            ) from None
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds: who says nothing must not keep a thread
    look: Callable[[], Health]
    live: LiveList | None

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer(200, metrics(self.look()), "text/plain; version=0.0.4; charset=utf-8")
        elif self.path in ("/healthz", "/readyz"):
            health = self.look()
            good = health.alive if self.path == "/healthz" else health.ready
            words = {"status": "ok" if good else "failing", "reasons": health.reasons, "spool": health.waiting}
            self._answer(200 if good else 503, json.dumps(words) + "\n", "application/json")
        elif self.live is not None:
            self._reply(
                self.live.answer(
                    self.path, self.client_address[0], {key.lower(): word for key, word in self.headers.items()}
                )
            )
        else:
            self._answer(404, "there are /healthz, /readyz and /metrics\n", "text/plain")

    def _answer(self, code: int, text: str, kind: str) -> None:
        self._reply(Reply(code, kind, text.encode()))

    def _reply(self, reply: Reply) -> None:
        self.send_response(reply.code)
        headers = {"Content-Type": reply.kind, "Content-Length": str(len(reply.body)), **reply.headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # a browser that has gone on
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a probe every few seconds is no news."""


def metrics(health: Health) -> str:
    """In the text format of Prometheus."""
    lines = ["# HELP afire_events_total What happened since the start.", "# TYPE afire_events_total counter"]
    lines += [f'afire_events_total{{event="{event}"}} {count}' for event, count in health.events.items()]
    lines += ["# HELP afire_spool Films or results in each state of the spool.", "# TYPE afire_spool gauge"]
    lines += [f'afire_spool{{state="{state}"}} {count}' for state, count in health.waiting.items()]
    for name, meaning, value in (
        ("afire_spool_free_bytes", "Free bytes on the disk of the spool.", health.free_bytes),
        ("afire_ready", "Whether films are taken.", int(health.ready)),
    ):
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} gauge", f"{name} {value}"]
    return "\n".join(lines) + "\n"


_HASH_SHOWN = 8  # digits
_PICTURE = re.compile(r"pictures/\d{3}/(\d{6,})-([a-z]+)\.(?:jpg|png)|thumbs/(\d+)\.jpg")
_NAMES = ("localhost", "127.0.0.1", "[::1]")
_SCRIPT, _PAGE = "text/javascript; charset=utf-8", "text/html; charset=utf-8"
_WAITING = {"incoming": "to be scored", "outgoing": "to be sent", "failed": "failed", "quarantine": "in quarantine"}


@dataclass(frozen=True)
class Reply:
    """An answer to a browser."""

    code: int
    kind: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class LiveList:
    """The newest ``most`` films. Threads may share it."""

    def __init__(
        self,
        detector: AnomalyDetector,
        rule: Rule,
        model_hash: str,
        most: int,
        waiting: Callable[[], Mapping[str, int]],
    ) -> None:
        self._detector, self._rule, self._model_hash, self._waiting = detector, rule, model_hash, waiting
        self._lock = Lock()
        self._films: deque[LiveFilm] = deque(maxlen=most)
        self._run, self._count = secrets.token_hex(8), 0

    def add(self, film: str, drawing: Drawing) -> None:
        """A film that was scored or is out of domain; ``film`` is its keyed hash."""
        shown, levels = drawing.film.shown, None
        if shown is not None and drawing.heat is not None:
            size = (shown.shape[0], shown.shape[1])
            levels = heat_levels(drawing.heat, size, self._detector.scale, self._detector.config.image.fit)
        self._keep(film, drawing.result, lambda result: LiveFilm.of(result, shown, levels))

    def add_unreadable(self, film: str, result: FilmResult) -> None:
        """A film that has nothing to show but why."""
        self._keep(film, result, lambda result: LiveFilm.of(result, None, None))

    def _keep(self, film: str, result: FilmResult, make: Callable[[FilmResult], LiveFilm]) -> None:
        label = f"{datetime.now():%Y-%m-%d %H:%M:%S} {film[:_HASH_SHOWN]}"
        with self._lock:
            self._films.append(make(replace(result, number=self._count, file=label)))
            self._count += 1

    # Answers

    def answer(self, target: str, caller: str, headers: Mapping[str, str]) -> Reply:
        """To a request for ``target`` from the address ``caller``; ``headers`` by their names in small letters."""
        if refused := _why_not(caller, headers):
            return Reply(403, "text/plain", f"{refused}\n".encode())
        path = urlsplit(target).path.lstrip("/")
        query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
        reply = self._page() if path == "" else self._part(path, query)
        return replace(reply, headers={**_GUARDS, **reply.headers})

    def _page(self) -> Reply:
        nonce = secrets.token_urlsafe(18)
        page = live_page(self._detector, self._rule, self._model_hash, self._run, nonce)
        policy = f"{page_policy(nonce)}; frame-ancestors 'none'"
        return Reply(200, _PAGE, page.encode(), {"Content-Security-Policy": policy})

    def _part(self, path: str, query: Mapping[str, str]) -> Reply:
        if path == "favicon.ico":  # which browsers ask for
            return Reply(204, "image/x-icon", b"")
        if path == "films.js":
            return Reply(200, _SCRIPT, self._news(query.get("after", "")).encode("ascii"))
        if path == "near.js" and (film := self._film(query.get("film", ""))):
            return Reply(200, _SCRIPT, live_near(self._detector, film).encode("ascii"))
        if (normal := live_normals(self._detector, path)) is not None:
            return Reply(200, "image/jpeg", normal)
        if found := _PICTURE.fullmatch(path):
            film = self._film(found[1] or found[3])
            made = live_picture(film, found[2] or "thumb") if film else None
            if made:
                return Reply(200, made[1], made[0])
        return Reply(404, "text/plain", b"there is nothing of that name\n")

    def _film(self, number: str) -> LiveFilm | None:
        with self._lock:
            films = list(self._films)
        return next((film for film in films if number.isdigit() and film.result.number == int(number)), None)

    def _news(self, after: str) -> str:
        with self._lock:
            films, edition = list(self._films), f"{self._run}-{self._count}"
        waiting = {words: self._waiting().get(state, 0) for state, words in _WAITING.items()}
        about = {"run": self._run, "edition": edition, "time": f"{datetime.now():%H:%M:%S}", "waiting": waiting}
        return live_script(None if after == edition else films, self._detector.scale.low, about)


_GUARDS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def _why_not(caller: str, headers: Mapping[str, str]) -> str:
    """Why somebody may not see the list, or nothing. Pages of others reach this machine through its browser: by a name
    of theirs that leads here, or by a picture or script that they include; both are told apart by what browsers say."""
    if not ip_address(caller.partition("%")[0]).is_loopback:
        return "the list is for this machine alone"
    if re.sub(r":\d+$", "", headers.get("host", "")) not in _NAMES:
        return "the list is at http://localhost and at no other name"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return "the list is for its own page alone"
    return ""
