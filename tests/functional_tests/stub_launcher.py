"""A fast stand-in for `torchrun --nproc-per-node 1`, which takes seconds to import torch. Starts one rank, forwards
SIGTERM to it, and then ends with 1, as torchrun does.
"""

import os
import signal
import subprocess
import sys


def main(argv: list[str]) -> int:
    """Runs the program that follows torchrun's options."""
    (at,) = [index for index, word in enumerate(argv) if word.endswith(".py")]
    rank = os.environ["SLURM_NODEID"]
    environment = {**os.environ, "RANK": rank, "WORLD_SIZE": os.environ["SLURM_JOB_NUM_NODES"]}
    signals: list[int] = []
    child = subprocess.Popen([sys.executable, "-SE", *argv[at:]], env=environment, start_new_session=True)

    def hand_on(number: int, _frame: object) -> None:
        signals.append(number)
        child.terminate()

    signal.signal(signal.SIGTERM, hand_on)
    code = child.wait()
    return 1 if signals else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
