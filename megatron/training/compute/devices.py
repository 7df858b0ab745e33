"""Loads the table of devices: peak operations, memory and links, from configs/devices.yaml and MEGATRON_DEVICES.

benchmarks/device_figures.py measures the local machine and writes its entry.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.parser import did_you_mean
from megatron.training.command_line.yaml_config import plain_values

DEVICES_FILE = Path(__file__).resolve().parents[3] / "configs" / "devices.yaml"
# Environment variables: a file whose entries override those of DEVICES_FILE, and the device that plans assume.
FILE_VARIABLE, NAME_VARIABLE = "MEGATRON_DEVICES", "MEGATRON_PLAN_DEVICE"
DEFAULT_NAME, CPU_NAME = "H100", "cpu"
_MAY_BE_NONE = ("bf16_tflops", "fp8_tflops")
_SHARES = "attainable_"
# Units by suffix of a field's name. A value above _MOST must have been given in another unit.
_UNITS = {
    "_tflops": "10^12 operations per second",
    "_gib": "GiB",
    "_gb_s": "10^9 bytes per second",
    "_us": "microseconds",
}
_MOST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Device:
    """An entry of configs/devices.yaml, which documents its figures and their sources."""

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
        """Total memory of the device."""
        return int(self.memory_gib * 2**30)

    @property
    def host_bytes_s(self) -> float:
        """Attainable bytes per second of a copy between device and host in one direction."""
        return self.host_gb_s * 1e9 * self.attainable_link

    def tflops(self, dtype: str) -> float:
        """Peak 10^12 operations per second of dense bf16, fp16, fp8 or fp32 products. Raises ValueError if unknown."""
        value = {"bf16": self.bf16_tflops, "fp16": self.bf16_tflops, "fp8": self.fp8_tflops, "fp32": self.fp32_tflops}
        if dtype not in value:
            raise ValueError(f"dtype is {dtype}: must be one of {', '.join(value)}")
        peak = value[dtype]
        if peak is None:
            raise ValueError(f"{self.name} has no peak of {dtype} products: choose a device that computes in {dtype}")
        return peak


def known_devices(environment: Mapping[str, str] | None = None) -> list[Device]:
    """Returns the devices of the file that MEGATRON_DEVICES names, then the others of configs/devices.yaml, in order.

    environment: the process's own by default. Raises CommandLineError naming file, entry, field and value of a mistake.
    """
    path = (os.environ if environment is None else environment).get(FILE_VARIABLE)
    own = devices_of_file(Path(path)) if path else []
    return [*own, *(one for one in devices_of_file(DEVICES_FILE) if one.name not in {other.name for other in own})]


def planned_device(environment: Mapping[str, str] | None = None) -> Device:
    """Returns the device of MEGATRON_PLAN_DEVICE, H100 by default. Raises CommandLineError for unknown names."""
    environment = os.environ if environment is None else environment
    name = environment.get(NAME_VARIABLE) or DEFAULT_NAME
    return device_of_name(name, source=NAME_VARIABLE, environment=environment)


def device_of_name(name: str, *, source: str, environment: Mapping[str, str] | None = None) -> Device:
    """Looks up a device by name.

    Raises CommandLineError for unknown names. source: the flag or variable that named it.
    """
    devices = {device.name: device for device in known_devices(environment)}
    if name not in devices:
        names = list(devices)
        raise CommandLineError(
            f"{source} is {name}: unknown device{did_you_mean(name, names)}; known: {', '.join(names)}"
        )
    return devices[name]


def peak_bf16_tflops(product: str) -> float | None:
    """Returns the peak 10^12 dense bf16 operations per second of a GPU, or None if the table lacks it.

    Raises CommandLineError for a mistake in the file of MEGATRON_DEVICES.
    """
    gpus = (device for device in known_devices() if device.name != CPU_NAME)
    return next((device.bf16_tflops for device in gpus if device.name in product), None)


def devices_of_file(path: Path) -> list[Device]:
    """Reads the entries of a file in order.

    Raises CommandLineError naming file, entry, field and value of a mistake.
    """
    try:
        entries = plain_values(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandLineError(f"{path}: {error.strerror}: must be a file of devices like {DEVICES_FILE}") from None
    except ValueError as error:
        raise CommandLineError(f"{path}: {error}") from None
    if not isinstance(entries, dict) or not entries:
        raise CommandLineError(f"{path} has no devices: must have names with figures like {DEVICES_FILE}")
    return [_device(str(name), figures, path=path) for name, figures in entries.items()]


def _device(name: str, figures: Any, *, path: Path) -> Device:
    names = [field.name for field in fields(Device) if field.name != "name"]
    if not isinstance(figures, dict):
        raise CommandLineError(f"{path}: {name} is {figures!r}: must have {', '.join(names)}")
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
