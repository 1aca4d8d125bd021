"""The live list behind the health port: what the service has scored lately, for who sits at this machine.

Results and small pictures of the newest films are in memory only and gone with the process. A film has no name but the
time and the keyed hash that the audit log knows it by. Answers go to this machine alone, to a page of our own and to no
page of others that a browser shows beside it, and nothing that is asked changes anything.
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from ipaddress import ip_address
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from afire.detect.base import AnomalyDetector
from afire.detect.findings import FilmResult, Rule
from afire.detect.run import Drawing
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
