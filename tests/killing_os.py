"""KillingOs: kills the process in the middle of its file operations. Contains no tests."""

import os
import signal
import sys
from typing import Any


class KillingOs:
    """A stand-in for the os module that kills the process at the n-th operation that changes files.

    Tests replace disk.os by it, since every write of a save passes through that name.
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
                # Only half of the bytes reach the file.
                half = os.write(args[0], args[1][: len(args[1]) // 2])
                self.count()
                return half
            return original(*args, **kwargs)

        return call
