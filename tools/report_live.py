"""What a live page is told of runs that go on: their content by version, and the changes since a version.

Serving it is report_server.py's, what the content is report.py's.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.report_changes import changes
from tools.run_follower import RunFollower
from tools.run_log import RunLog

MAX_VERSIONS = 4  # a page that missed more is told everything
MIN_SECONDS = 1.0  # between two looks at the files, however many pages ask
SHARE_OF_TIME = 0.2  # of the server's, at most, for reading and drawing


class LiveReport:
    """Followed runs; may be asked from several threads.

    content_of: the content of the page for runs. clock: seconds, rising.
    """

    def __init__(
        self,
        places: Sequence[Path],
        content_of: Callable[[Sequence[RunLog]], dict[str, Any]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._followers = [RunFollower(place) for place in places]
        self._content_of, self._clock = content_of, clock
        self._lock = threading.Lock()
        # Versions of another server on the same port mean nothing here.
        self._name, self._number = secrets.token_hex(4), 0
        self._contents: dict[str, dict[str, Any]] = {}  # by version, the latest at the end
        self._changes: dict[str, Any] = {}  # from a version to the latest, for several pages that ask the same
        self._look_again_at = 0.0

    def answer(self, since: str | None) -> dict[str, Any]:
        """{"version", "content"} for a version not kept, else {"version", "changes"}; None of these for no news."""
        with self._lock:
            self._look()
            version = next(reversed(self._contents))
            if since not in self._contents:
                return {"version": version, "content": self._contents[version]}
            if since not in self._changes:
                self._changes[since] = changes(self._contents[since], self._contents[version])
            return {"version": version, "changes": self._changes[since]}

    def close(self) -> None:
        """Lets go of the files."""
        with self._lock:
            for follower in self._followers:
                follower.close()

    def _look(self) -> None:
        if self._clock() < self._look_again_at:
            return
        began = self._clock()
        news = [follower.update() for follower in self._followers]
        if any(news) or not self._contents:
            self._add(self._content())
        took = self._clock() - began
        self._look_again_at = began + max(MIN_SECONDS, took / SHARE_OF_TIME)

    def _content(self) -> dict[str, Any]:
        missing = [follower.problem for follower in self._followers if follower.problem]
        runs = [follower.run() for follower in self._followers if not follower.problem]
        return {**(self._content_of(runs) if runs else {}), "waits": missing}

    def _add(self, content: dict[str, Any]) -> None:
        self._number += 1
        self._contents[f"{self._name}-{self._number}"] = content
        self._changes.clear()
        while len(self._contents) > MAX_VERSIONS:
            self._contents.pop(next(iter(self._contents)))
