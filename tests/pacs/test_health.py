"""The live list behind the health port: what it tells, to whom, and what a browser shows of it."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pynetdicom")

from afire.detect.base import AnomalyDetector
from afire.pacs import health
from afire.pacs.health import LiveList
from afire.pacs.service import Service
from tests.browser import CHROMIUM, MISSING, Browser
from tests.detect_page_parts import at, chosen, listed, report_of, with_atlas
from tests.pacs.films import IDENTIFYING, dataset, instance
from tests.pacs.peers import LOOPBACK, Pacs, StartService, store, wait_for

NAME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [0-9a-f]{8}")


def get(service: Service, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(LOOPBACK, service.health_port, timeout=20)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def news(service: Service, after: str = "") -> dict[str, Any]:
    code, body, _ = get(service, f"/films.js?after={after}")
    call = re.fullmatch(r"afireLive\((.*)\);\n", body.decode("ascii"))
    assert code == 200 and call
    return dict(json.loads(call[1]))


@pytest.fixture
def service(start_service: StartService, pacs: Pacs) -> Service:
    one = start_service(health=(LOOPBACK, 0), live=3)
    assert store(one.port, dataset(0), dataset(1)) == [0, 0]
    wait_for(lambda: len(pacs.kept) == 4 and len(news(one)["films"]) == 2)
    return one


def test_the_newest_films_are_told_without_a_name(service: Service, pacs: Pacs) -> None:
    told = news(service)
    assert [NAME.fullmatch(row[1]) for row in told["films"]].count(None) == 0
    assert {row[0] for row in told["films"]} == {0, 1}
    assert news(service, told["edition"]).get("films") is None, "nothing is new"
    store(service.port, dataset(2), dataset(3))
    wait_for(lambda: news(service)["edition"] != told["edition"] and {2, 3} <= {r[0] for r in news(service)["films"]})
    assert len(news(service)["films"]) == 3, "the oldest is forgotten"
    everything = b"".join(get(service, path)[1] for path in ("/", "/films.js", "/metrics", "/page/normal.jpg"))
    assert not [word for word in (*IDENTIFYING, instance(0)) if word.encode() in everything]


def test_pictures_are_drawn_when_they_are_asked_for(service: Service) -> None:
    for path, start in {
        "/pictures/000/000001-film.jpg": b"\xff\xd8",
        "/pictures/000/000001-heat.png": b"\x89PNG",
        "/pictures/000/000001-overlay.jpg": b"\xff\xd8",
        "/thumbs/1.jpg": b"\xff\xd8",
        "/page/normal.jpg": b"\xff\xd8",
    }.items():
        code, body, headers = get(service, path)
        assert code == 200 and body.startswith(start) and headers["Cache-Control"] == "no-store", path
    for path in ("/pictures/000/000001-restored.jpg", "/thumbs/9.jpg", "/../spool/key", "/pictures/key", "/near.js"):
        assert get(service, path)[0] == 404, path


def test_it_is_for_its_own_page_on_this_machine_alone(service: Service) -> None:
    code, page, headers = get(service, "/")
    policy, nonce = headers["Content-Security-Policy"], report_of(page.decode())["nonce"]
    assert code == 200 and f"'nonce-{nonce}'" in policy and policy.startswith("default-src 'none'; img-src 'self'")
    assert "frame-ancestors 'none'" in policy and "connect-src" not in policy
    assert f"'nonce-{nonce}'" in page.decode() and nonce not in get(service, "/")[1].decode(), "a new one each time"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"127.0.0.1.evil.example:{service.health_port}"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ):
        assert get(service, "/films.js", **headers)[0] == 403, headers
        assert get(service, "/healthz", **headers)[0] == 200
    assert get(service, "/films.js", Host=f"localhost:{service.health_port}")[0] == 200
    for method in ("POST", "PUT", "DELETE"):
        assert get(service, "/", method)[0] == 501, "read-only"


def test_nobody_beyond_this_machine_is_answered(detector: AnomalyDetector) -> None:
    from afire.detect.findings import rule_of

    live = LiveList(detector, rule_of(detector), "ab" * 32, 5, dict)
    assert live.answer("/", "192.0.2.7", {"host": "localhost"}).code == 403
    assert live.answer("/", "::1", {"host": "[::1]:8080"}).code == 200


def test_a_service_may_have_no_list(start_service: StartService) -> None:
    plain = start_service(health=(LOOPBACK, 0), live=0)
    assert get(plain, "/")[0] == 404 and get(plain, "/readyz")[0] == 200 and not plain.live_address


def test_who_asks_nothing_keeps_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert health._Handler.timeout == 10
    monkeypatch.setattr(health._Handler, "timeout", 0.1)
    server = health.HealthServer(LOOPBACK, 0, lambda: health.Health(alive=True, ready=True))
    try:
        for words in (b"", b"GET /healthz HT"):
            with socket.create_connection((LOOPBACK, server.port), timeout=10) as silent:
                silent.sendall(words)
                assert silent.recv(1) == b"", "it hangs up"
    finally:
        server.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    started = Browser(tmp_path / "browser")
    yield started
    started.close()


@pytest.mark.slow
def test_the_list_renews_itself(
    start_service: StartService, browser: Browser, detector: AnomalyDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detector, "atlas", with_atlas(detector).atlas)
    service = start_service(health=(LOOPBACK, 0))
    browser.open(service.live_address)
    assert browser.problems() == [] and browser.text("h1") == "Live list" and listed(browser) == []
    store(service.port, dataset(0))
    browser.wait_for("document.querySelectorAll('.row.film:not([hidden])').length === 1")
    first = chosen(browser)
    assert NAME.fullmatch(first) and listed(browser) == [first]
    browser.wait_for("document.querySelector('.row.film .thumb').style.backgroundImage.includes('thumbs/0.jpg')")
    browser.wait_for("document.querySelector('.stage').getAttribute('aria-label')")
    browser.hover(*at(browser, 0.5, 0.5))
    browser.wait_for("document.querySelector('#normal-words').textContent.includes('closest first')")
    store(service.port, dataset(1), dataset(2))
    browser.wait_for("document.querySelectorAll('.row.film:not([hidden])').length === 3")
    assert chosen(browser) == first, "the film that is looked at stays"
    assert listed(browser)[-1] == first, "the newest is on top"
    assert "as of" in browser.text("#live") and browser.problems() == []
    service.stop()
    browser.wait_for("document.querySelector('#live').textContent.includes('does not answer')")
    assert listed(browser)[-1] == first
