"""A stand-in for a rank of pretrain_gpt in a cluster job, with its signals, exit codes and checkpoints, no training.

The environment variable STUB is JSON. train_iters: last iteration. save_seconds: duration of the save after a signal.
stop_at: iteration at which the first attempt waits for the signal. saves: whether it saves a checkpoint before. Ranks
communicate by files in --save.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

POLL_SECONDS = 0.02


def main(argv: list[str]) -> None:
    """Waits for the signal in the first attempt. In later attempts, or without stop_at, saves the last iteration."""
    # The last --save wins, as with argparse.
    folder = Path([following for word, following in zip(argv, argv[1:]) if word == "--save"][-1])
    stub, rank = json.loads(os.environ["STUB"]), int(os.environ["RANK"])
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    tracker, stopped = folder / "latest_checkpointed_iteration.txt", folder / "signalled"
    if stub["stop_at"] is None or stopped.exists() or tracker.exists():
        _save(folder, stub["train_iters"], stub)
        return
    folder.mkdir(exist_ok=True)
    (folder / f"rank {rank} listens").touch()
    if rank == 0:
        while len(list(folder.glob("rank * listens"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(POLL_SECONDS)
        # Saved only after all ranks have started, since a rank that finds a checkpoint assumes the second attempt.
        if stub["saves"]:
            _save(folder, stub["stop_at"] - 1, stub)
        with open(os.environ["MOMENT"], "w") as moment:
            moment.write("waits")
    # The file `signalled` is the only way to learn that a different rank received the signal.
    while not signals and not stopped.exists():
        time.sleep(POLL_SECONDS)
    stopped.touch()
    time.sleep(stub["save_seconds"])
    _save(folder, stub["stop_at"], stub)
    print(f"rank {rank} has saved", flush=True)


def _save(folder: Path, iteration: int, stub: dict) -> None:
    if os.environ["RANK"] != "0":
        return
    target = folder / f"iter_{iteration:07d}"
    target.mkdir(parents=True, exist_ok=True)
    (target / "common.json").write_text(json.dumps({"args": {"train_iters": stub["train_iters"]}}))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


if __name__ == "__main__":
    main(sys.argv[1:])
