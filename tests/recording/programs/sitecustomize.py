"""Records a program that a test starts. Python imports this file at startup because plugin.py adds it to PYTHONPATH."""

import atexit
import os
import sys
from pathlib import Path

# The server that ranks are forked from does not belong to a test.
if os.environ.get("RECORD_TESTS") and not any("multiprocessing" in word for word in sys.orig_argv):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests.recording.recorder import record_this_process

    sys.path.pop(0)
    recorder = record_this_process("program")
    if recorder is not None:
        atexit.register(recorder.finish)
