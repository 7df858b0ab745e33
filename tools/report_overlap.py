"""What the report shows of a step's communication: when each bucket was complete, under way and waited for."""

from typing import Any

from tools.run_log import RunLog


def timeline(run: RunLog) -> dict[str, Any] | None:
    """The transfers of the last step that the run noted, in milliseconds; None where it noted none we can read."""
    try:
        rows = [
            {
                "name": f"{number}. {one['traffic']} {one['name']}",
                "megabytes": float(one["bytes"]) / 1e6,
                "ready": float(one["ready_ms"]),
                "launched": float(one["launched_ms"]),
                "done": float(one["done_ms"]),
                "waits": [[float(begin), float(end)] for begin, end in one["waits_ms"]],
            }
            for number, one in enumerate(run.overlap["transfers"], 1)
        ]
        return {"step": run.overlap["iteration"], "backward_end": float(run.overlap["backward_end_ms"]), "rows": rows}
    except (KeyError, TypeError, ValueError):
        return None
