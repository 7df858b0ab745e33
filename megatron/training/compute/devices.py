"""Loads the table of devices: peak operations, memory and links, from configs/devices.yaml and MEGATRON_DEVICES.

The device "here" is this machine: its GPU's entry, or the CPU, which is measured in about a second.
benchmarks/device_figures.py also measures messages between processes, and writes an entry for the file.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.parser import did_you_mean
from megatron.training.command_line.yaml_config import plain_values

DEVICES_FILE = Path(__file__).resolve().parents[2] / "configs" / "devices.yaml"
# Environment variables: a file whose entries override DEVICES_FILE, and the device for which runs are planned.
FILE_VARIABLE, NAME_VARIABLE = "MEGATRON_DEVICES", "MEGATRON_PLAN_DEVICE"
DEFAULT_NAME, CPU_NAME = "H100", "cpu"
# The name of the machine on which this process runs.
HERE = "here"
_MAY_BE_NONE = ("bf16_tflops", "fp8_tflops")
_SHARES = "attainable_"
# Units by suffix of a field's name. A value above _MOST was probably given in a different unit.
_UNITS = {
    "_tflops": "10^12 operations per second",
    "_gib": "GiB",
    "_gb_s": "10^9 bytes per second",
    "_us": "microseconds",
}
_MOST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Device:
    """An entry of configs/devices.yaml, which documents the fields and their sources."""

    name: str
    bf16_tflops: float | None
    fp8_tflops: float | None
    fp32_tflops: float
    attainable_matmul: float
    attainable_attention: float
    attainable_memory: float
    attainable_link: float
    memory_gib: float
    memory_gb_s: float
    host_gb_s: float
    devices_per_node: int
    node_gb_s: float
    node_latency_us: float
    network_gb_s: float
    network_latency_us: float
    kernel_us: float

    @property
    def memory_bytes(self) -> int:
        """Total memory of the device, in bytes."""
        return int(self.memory_gib * 2**30)

    @property
    def host_bytes_s(self) -> float:
        """Attainable bytes per second of a copy between device and host in one direction."""
        return self.host_gb_s * 1e9 * self.attainable_link

    def tflops(self, dtype: str) -> float:
        """Returns the peak of dense matrix multiplications in a dtype, in 10^12 operations per second.

        dtype: bf16, fp16, fp8 or fp32. Raises ValueError if the peak is unknown.
        """
        value = {"bf16": self.bf16_tflops, "fp16": self.bf16_tflops, "fp8": self.fp8_tflops, "fp32": self.fp32_tflops}
        if dtype not in value:
            raise ValueError(f"dtype is {dtype}: must be one of {', '.join(value)}")
        peak = value[dtype]
        if peak is None:
            raise ValueError(
                f"{self.name} does not support {dtype} matrix multiplications: choose a device that computes in {dtype}"
            )
        return peak


def known_devices(environment: Mapping[str, str] | None = None) -> list[Device]:
    """Returns the devices in the file named by MEGATRON_DEVICES, followed by other devices of configs/devices.yaml.

    environment: defaults to os.environ. Raises CommandLineError naming file, entry, field and value of an error.
    """
    path = (os.environ if environment is None else environment).get(FILE_VARIABLE)
    own = devices_of_file(Path(path)) if path else []
    return [*own, *(one for one in devices_of_file(DEVICES_FILE) if one.name not in {other.name for other in own})]


def planned_device(environment: Mapping[str, str] | None = None) -> Device:
    """Returns the device named by MEGATRON_PLAN_DEVICE, which defaults to H100. "here" means this machine.

    Raises CommandLineError for unknown names.
    """
    environment = os.environ if environment is None else environment
    name = environment.get(NAME_VARIABLE) or DEFAULT_NAME
    return device_of_name(name, source=NAME_VARIABLE, environment=environment)


def plans_for_gpu() -> bool:
    """Returns whether MEGATRON_PLAN_DEVICE is, or defaults to, a GPU."""
    name = os.environ.get(NAME_VARIABLE) or DEFAULT_NAME
    return torch.cuda.is_available() if name == HERE else name != CPU_NAME


def device_of_name(name: str, *, source: str, environment: Mapping[str, str] | None = None) -> Device:
    """Returns the device with a name, which may be "here".

    source: flag or variable that contains the name, for errors. Raises CommandLineError for unknown names.
    """
    devices = {device.name: device for device in known_devices(environment)}
    if name == HERE:
        return _device_here(devices, source=source)
    if name not in devices:
        names = list(devices)
        raise CommandLineError(
            f"{source} is {name}: unknown device{did_you_mean(name, names)}; known: {', '.join(names)}, and {HERE} for "
            "this machine"
        )
    return devices[name]


def peak_bf16_tflops(product: str) -> float | None:
    """Returns the peak of a GPU's dense bf16 matrix multiplications, in 10^12 operations per second.

    product: name of the GPU. Returns None if the table does not list it. Raises CommandLineError for an error in the
    file named by MEGATRON_DEVICES.
    """
    gpus = (device for device in known_devices() if device.name != CPU_NAME)
    return next((device.bf16_tflops for device in gpus if device.name in product), None)


def devices_of_file(path: Path) -> list[Device]:
    """Reads the devices of a file, in order.

    Raises CommandLineError naming file, entry, field and value of an error.
    """
    try:
        entries = plain_values(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandLineError(f"{path}: {error.strerror}: must be a file of devices like {DEVICES_FILE}") from None
    except ValueError as error:
        raise CommandLineError(f"{path}: {error}") from None
    if not isinstance(entries, dict) or not entries:
        raise CommandLineError(f"{path} has no devices: must list devices in the format of {DEVICES_FILE}")
    return [_device(str(name), figures, path=path) for name, figures in entries.items()]


def _device(name: str, figures: Any, *, path: Path) -> Device:
    names = [field.name for field in fields(Device) if field.name != "name"]
    if not isinstance(figures, dict):
        raise CommandLineError(f"{path}: {name} is {figures!r}: must be a mapping with {', '.join(names)}")
    for wrong in figures:
        if wrong not in names:
            raise CommandLineError(f"{path}: {name}.{wrong} is unknown{did_you_mean(str(wrong), names)}")
    for missing in names:
        if missing not in figures:
            raise CommandLineError(f"{path}: {name}.{missing} is missing: {_right(missing)}")
    for field, value in figures.items():
        if not _fits(field, value):
            raise CommandLineError(f"{path}: {name}.{field} is {value!r}: {_right(field)}")
    return Device(name=name, **figures)


def _fits(field: str, value: Any) -> bool:
    if value is None:
        return field in _MAY_BE_NONE
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if field == "devices_per_node":
        return isinstance(value, int) and value >= 1
    # NaN fails both comparisons.
    most = 1 if field.startswith(_SHARES) else _MOST
    return 0 <= value <= most if field.endswith("_us") else 0 < value <= most


def _right(field: str) -> str:
    if field == "devices_per_node":
        return "must be a whole number of at least 1"
    if field.startswith(_SHARES):
        return "must be a number above 0 and up to 1"
    unit = next(unit for end, unit in _UNITS.items() if field.endswith(end))
    least = "of at least 0" if field.endswith("_us") else "above 0"
    none = ", or null for none" if field in _MAY_BE_NONE else ""
    return f"must be a number {least} and up to {_MOST}, in {unit}{none}"


# --- This machine ---


def _device_here(devices: Mapping[str, Device], *, source: str) -> Device:
    if not torch.cuda.is_available():
        # The table's entry describes the links, which a single process cannot measure.
        return replace(devices[CPU_NAME], **cpu_figures(rounds=5))
    product = torch.cuda.get_device_name()
    found = next((one for name, one in devices.items() if name != CPU_NAME and name in product), None)
    if found is None:
        raise CommandLineError(
            f"{source} is {HERE}: this machine's {product} is not known; known: {', '.join(devices)}; add an entry in "
            f"the file of {FILE_VARIABLE}"
        )
    return found


def cpu_figures(rounds: int) -> dict[str, Any]:
    """Measures one thread of this machine's CPU, and returns the fields of a Device except links between processes.

    rounds: number of runs of each measurement. The fastest run counts, because other processes only slow a run down.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peaks = {f"{name}_tflops": _product_tflops(dtype, rounds) for name, dtype in _DTYPES.items()}
        large = torch.ones(_LARGE_ELEMENTS, dtype=torch.float32)
        result = torch.empty_like(large)
        copy = _best_seconds(lambda: torch.add(large, 1.0, out=result), rounds)
        few = torch.ones(8, dtype=torch.float32)
        launches = _best_seconds(lambda: [few + 1.0 for _ in range(1000)], rounds)
        attention = _attention_tflops(rounds)
    finally:
        torch.set_num_threads(threads)
    return {
        **peaks,
        "fp8_tflops": None,
        "attainable_matmul": 1.0,
        "attainable_attention": min(1.0, attention / peaks["fp32_tflops"]),
        "attainable_memory": 1.0,
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "memory_gb_s": 2 * large.nbytes / copy / 1e9,
        "host_gb_s": large.nbytes / copy / 1e9,
        "devices_per_node": os.cpu_count() or 1,
        "kernel_us": launches * 1e3,
    }


_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Larger than any cache.
_LARGE_ELEMENTS = 1 << 24
_MATRIX_SIZE = 512


def _product_tflops(dtype: torch.dtype, rounds: int) -> float:
    left = right = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, dtype=dtype)
    return 2 * _MATRIX_SIZE**3 / _best_seconds(lambda: left @ right, rounds) / 1e12


def _attention_tflops(rounds: int) -> float:
    batch, heads, tokens, size = 4, 4, 256, 64
    query = torch.ones(batch, heads, tokens, size, dtype=torch.float32)
    seconds = _best_seconds(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True), rounds)
    # Two matrix multiplications with 2 operations per multiply-add. The causal mask halves both.
    return 2 * batch * heads * tokens**2 * size / seconds / 1e12


def _best_seconds(run: Callable[[], object], rounds: int) -> float:
    run()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
