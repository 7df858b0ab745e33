"""Drives a headless Chromium over its DevTools pipe, for tests of HTML pages. Contains no tests."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None and "CI_HAS_BROWSER" not in os.environ,
    reason="needs a browser: apt-get install chromium, as .ci/run does",
)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-color-profile=srgb"),
]
# JavaScript that returns the texts that extend beyond their figure or overlap each other, and the clipped parts.
FIGURE_PROBLEMS = """[...document.querySelectorAll(".plot")].flatMap(picture => {
  const frame = picture.getBoundingClientRect(), problems = [];
  const texts = [...picture.querySelectorAll("svg text")].map(t => [t.textContent, t.getBoundingClientRect()])
    .filter(([, box]) => box.width > 0);
  for (const [text, box] of texts) {
    if (box.left < frame.left - 1 || box.right > frame.right + 1) problems.push(text);
    if (box.top < frame.top - 1 || box.bottom > frame.bottom + 1) problems.push(text);
  }
  texts.forEach(([a, x], i) => texts.slice(i + 1).forEach(([b, y]) => {
    if (x.left < y.right - 2 && y.left < x.right - 2 && x.top < y.bottom - 6 && y.top < x.bottom - 6)
      problems.push(a + " on " + b);
  }));
  return problems;
}).concat([...document.querySelectorAll(".card:not(.scroll), header, main")]
  .filter(part => part.scrollWidth > part.clientWidth + 1).map(part => part.className + ": " + part.innerText))"""


def embedded_figures(page: str) -> list[dict[str, Any]]:
    """Returns the figures embedded in an HTML page, in plotly's JSON form."""
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]


def without_plotly(page: str) -> str:
    """Returns an HTML page without the embedded source of plotly."""
    before, script, after = re.split(r'(?s)(?<=<script id="plotly">)(.*?)(?=</script>)', page, maxsplit=1)
    assert len(script) > 10**6
    return before + after


class Page:
    """A browser tab. problems: console messages and uncaught errors. requests: URLs of all network requests."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb", buffering=0), os.fdopen(answers, "rb", buffering=0)
        self._number, self._rest, self._session = 0, b"", {}
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {
            "sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"],
        }
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, width: int, height: int = 2000) -> None:
        """Opens the URL in a window of width x height pixels, and waits until the page is loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Evaluates a JavaScript expression on the page and returns its JSON value."""
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_for(self, expression: str, *, seconds: float = 60.0) -> None:
        """Waits until a JavaScript expression is true on the page."""
        self.until(lambda: bool(self.evaluate(expression)), what=expression, seconds=seconds)

    def until(self, is_so: Callable[[], bool], *, what: str, seconds: float = 60.0) -> None:
        """Polls `is_so` until it returns True. Raises AssertionError, which names `what`, after `seconds`."""
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, f"still false after {seconds} s: {what}; problems: {self.problems}"
            time.sleep(0.05)

    def cut_off(self, is_cut: bool) -> None:
        """Takes the page's network offline, or back online."""
        self._call(
            "Network.emulateNetworkConditions", offline=is_cut, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self._notice(answer.get("method"), answer.get("params", {}))
        raise AssertionError(f"the browser ended during {method}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" in self._rest:
                message, self._rest = self._rest.split(b"\0", 1)
                yield json.loads(message)
            more = self._answers.read(2**16)
            if not more:
                return
            self._rest += more

    def _notice(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled":
            self.problems.append(f"{params['type']}: {[one.get('value') for one in params['args']]}")
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Log.entryAdded":
            self.problems.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def opened_browser(folder: Path) -> Iterator[Page]:
    """Starts a browser that cannot resolve the names of other machines. folder: for the browser's files."""
    assert BROWSER is not None, "needs a browser: apt-get install chromium, as .ci/run does"
    # Chromium reads commands from descriptor 3 and writes answers to 4, so our descriptors must have higher numbers.
    ends = (*os.pipe(), *os.pipe())
    reads, to_browser, from_browser, writes = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in ends)
    for end in ends:
        os.close(end)
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={folder / 'profile'}"]
    process = subprocess.Popen(
        [BROWSER, *FLAGS, *offline, "--remote-debugging-pipe", "about:blank"],
        preexec_fn=lambda: (os.dup2(reads, 3), os.dup2(writes, 4)),
        pass_fds=(3, 4),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(reads)
    os.close(writes)
    try:
        yield Page(to_browser, from_browser)
    finally:
        process.terminate()
        process.wait(timeout=30)
