"""How the service is doing: ``/healthz``, ``/readyz`` and ``/metrics`` (Prometheus text), in which no film is named.

The live list is at the same port.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from afire.errors import UserError
from afire.pacs.live import LiveList, Reply


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
