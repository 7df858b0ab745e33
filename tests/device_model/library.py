"""Compiles engine_streams.cpp once and loads it into a process that has not imported torch yet.

Import this module before torch, because torch queries the capabilities of the GPU when it is imported.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("engine_streams.cpp")
COMPILER = os.environ.get("CXX", "g++")


def built() -> Path:
    """Returns the library's path. Compiles the library once per version of the source and of torch (2 seconds)."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is not installed"
    torch_folder = Path(spec.origin).parent
    key = hashlib.sha256(SOURCE.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()[:16]
    target = Path(sys.prefix, "device_model", f"engine_streams_{key}.so")
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder, "library.so")
            words = [
                *shlex.split(COMPILER),
                "-std=c++20",
                "-O1",
                "-fPIC",
                "-shared",
                f"-I{torch_folder / 'include'}",
                str(SOURCE),
            ]
            words += [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(made)]
            subprocess.run(words, check=True)
            made.replace(target)  # atomic, as several processes may build it
    return target


def load() -> ctypes.PyDLL:
    """Loads the library. Raises RuntimeError if torch has been imported before."""
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported already: import tests.device_model.library before it")
    path = built()
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), ctypes.RTLD_GLOBAL)
    # PyDLL keeps the GIL: the library's functions are short and call back into Python.
    return ctypes.PyDLL(str(path))


LIBRARY = load()
