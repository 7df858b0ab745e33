"""Waits for saves beside training without a call to them. No test here."""

import threading


def join_save_threads() -> None:
    """Waits until each save that runs beside training in this process has ended, for up to a minute each."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint save":
            thread.join(60)
