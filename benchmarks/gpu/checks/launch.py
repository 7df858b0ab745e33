"""Runs a module as a check: python -m benchmarks.gpu.checks.launch MODULE [ARGUMENT ...]. Checks nothing itself.

On SIGINT all threads print their stacks before Python raises KeyboardInterrupt. A thread that hangs in a driver call
never raises it, but its stack shows where it hangs.
"""

import faulthandler
import runpy
import signal
import sys

if __name__ == "__main__":
    faulthandler.register(signal.SIGINT, all_threads=True, chain=True)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
