"""KillingOs: ends the process in the middle of what it writes. Holds no tests."""

import os
import signal
import sys
from typing import Any


class KillingOs:
    """The os module, but for its n-th call that changes anything: the process ends there, or just behind it.

    In the place of disk.os: every write of a save passes through there.
    """

    CHANGES = ("open", "write", "fsync", "close", "mkdir", "rename", "replace", "unlink")

    def __init__(self, number: int) -> None:
        self.left = number

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            print("ended inside a save", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def __getattr__(self, name: str) -> Any:
        original = getattr(os, name)
        if name not in self.CHANGES:
            return original

        def call(*args: Any, **kwargs: Any) -> Any:
            self.count()
            if name == "write" and len(args[1]) > 512:
                # Half of it gets to the file.
                half = os.write(args[0], args[1][: len(args[1]) // 2])
                self.count()
                return half
            return original(*args, **kwargs)

        return call
