"""Waits for background saves by their threads. Contains no tests."""

import threading


def join_save_threads() -> None:
    """Waits until all background saves of this process have ended, for up to a minute each."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint save":
            thread.join(60)
