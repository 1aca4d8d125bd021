"""A headless Chromium for tests of pages, spoken to over two pipes (the DevTools protocol): no library, no port.

``CHROMIUM`` is None where there is none, and tests skip. Keys and mouse arrive as those of a user do.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
MISSING = "needs Chromium (Debian: apt-get install chromium)"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--mute-audio",
    "--force-device-scale-factor=1", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE = 60.0  # seconds for one answer, on a busy machine
_NAMED = {
    "Tab": 9, "Enter": 13, "Escape": 27, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36, "ArrowLeft": 37,
    "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip


class Browser:
    """One browser with one page; ``open`` goes to another."""

    def __init__(self, folder: Path, width: int = 1500, height: int = 950) -> None:
        assert CHROMIUM is not None
        self.downloads = folder / "downloads"
        self.downloads.mkdir(parents=True)
        self._number, self._left = 0, b""
        self._events: list[dict[str, Any]] = []
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        # Chromium listens on 3 and answers on 4, whatever these are here.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (their_in, their_out)]

        def connect() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        command = [CHROMIUM, *_FLAGS, f"--window-size={width},{height}", f"--user-data-dir={folder / 'profile'}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"], preexec_fn=connect, pass_fds=(3, 4), stderr=subprocess.DEVNULL
        )
        for end in (their_in, their_out, *high):
            os.close(end)
        target = next(one for one in self._ask("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = ""
        attached = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        self._ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, page: Path | str, until: str = "document.documentElement?.dataset.ready === 'yes'") -> None:
        """Go to a page, a file or an address, and wait until it says that it is ready."""
        self._events.clear()
        self._ask("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self.wait_for(until)

    def run(self, script: str) -> Any:
        """The value of an expression, or of the promise it is."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"].get("exception", {}).get("description", script))
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + _PATIENCE
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} did not come true; {self.problems()}"
            time.sleep(0.03)

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0))))")

    def press(self, *keys: str, shift: bool = False) -> None:
        for key in keys:
            code = f"Digit{key}" if key.isdigit() else key
            text = {} if key in _NAMED or shift else {"text": key}
            number = _NAMED.get(key, ord(key[0].upper()))
            about = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": 8 if shift else 0}
            self._ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **about, **text)
            self._ask("Input.dispatchKeyEvent", type="keyUp", **about)
        self.settle()

    def write(self, text: str) -> None:
        """Into the field that has the focus."""
        self._ask("Input.insertText", text=text)
        self.settle()

    def click(self, selector: str) -> None:
        x, y = self.middle(selector)
        self._mouse("mouseMoved", x, y)
        self._mouse("mousePressed", x, y, button="left", clickCount=1)
        self._mouse("mouseReleased", x, y, button="left", clickCount=1)
        self.settle()

    def hover(self, x: float, y: float) -> None:
        self._mouse("mouseMoved", x, y)
        self.settle()

    def wheel(self, x: float, y: float, down: float) -> None:
        self._mouse("mouseWheel", x, y, deltaX=0, deltaY=down)
        self.settle()

    def drag(self, start: tuple[float, float], by: tuple[float, float], button: str = "left") -> None:
        """Press, move in steps, release."""
        x, y = start
        held = {"left": 1, "right": 2}[button]
        self._mouse("mouseMoved", x, y)
        self._mouse("mousePressed", x, y, button=button, clickCount=1, buttons=held)
        for part in (0.5, 1.0):
            self._mouse("mouseMoved", x + part * by[0], y + part * by[1], button=button, buttons=held)
        self._mouse("mouseReleased", x + by[0], y + by[1], button=button, clickCount=1)
        self.settle()

    def middle(self, selector: str) -> tuple[float, float]:
        box = self.box(selector)
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def box(self, selector: str, number: int = 0) -> dict[str, float]:
        """Where an element is on the screen, of several the one with the number."""
        found = f"document.querySelectorAll({json.dumps(selector)})[{number}].getBoundingClientRect()"
        return dict(self.run(f"(({{x, y, width, height}}) => ({{x, y, width, height}}))({found})"))

    def fill(self, selector: str, value: str) -> None:
        """Put a value into a field, as choosing or typing it does."""
        field = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('input'))")
        self.settle()

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    def screenshot(self, file: Path | None = None, clip: dict[str, float] | None = None) -> bytes:
        """The page as PNG."""
        area = {"clip": {**clip, "scale": 1}} if clip is not None else {}
        data = base64.b64decode(self._ask("Page.captureScreenshot", format="png", **area)["data"])
        if file is not None:
            file.write_bytes(data)
        return data

    def downloaded(self, name: str) -> Path:
        """Wait for a whole file."""
        end = time.monotonic() + _PATIENCE
        while not (self.downloads / name).is_file():
            assert time.monotonic() < end, f"{name} was not saved"
            time.sleep(0.03)
        return self.downloads / name

    def busy(self) -> float:
        """CPU seconds of the page's main thread since the first call, or since it was opened."""
        self._ask("Performance.enable", timeDomain="threadTicks")
        metrics = self._ask("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))

    def problems(self) -> list[str]:
        """What the page has complained about since it was opened: errors, and violations of its policy."""
        found = []
        for event in self._events:
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"].get("exception", {}).get("description")))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
        return found

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        session = {"sessionId": self._session} if getattr(self, "_session", "") else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _PATIENCE
        while True:
            answer = self._next(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            if "method" in answer:
                self._events.append(answer)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium has ended"
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(message))
