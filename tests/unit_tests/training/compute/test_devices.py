"""Tests of the device table: the shipped file, users' files, and errors about invalid ones."""

import os
from pathlib import Path

import pytest
import torch
import yaml

from megatron.training.compute.devices import (
    DEVICES_FILE,
    devices_of_file,
    known_devices,
    peak_bf16_tflops,
    planned_device,
)

ENTRIES = yaml.safe_load(DEVICES_FILE.read_text(encoding="utf-8"))


def _file(folder: Path, text: object) -> Path:
    path = folder / "own.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text, sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("product", "peak"),
    [
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H800", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA T1000", None),
        ("cpu (2 threads)", None),
    ],
)
def test_gpus_are_known_by_what_they_call_themselves(product: str, peak: float | None) -> None:
    assert peak_bf16_tflops(product) == peak


def test_plans_are_for_an_h100_unless_another_is_named() -> None:
    assert planned_device({}).name == "H100"
    device = planned_device({"MEGATRON_PLAN_DEVICE": "cpu"})
    assert device.name == "cpu" and device.tflops("fp32") == device.fp32_tflops
    with pytest.raises(
        ValueError, match=r"MEGATRON_PLAN_DEVICE is H10O: unknown device; did you mean H100\?; known: GB200, B2"
    ):
        planned_device({"MEGATRON_PLAN_DEVICE": "H10O"})
    with pytest.raises(ValueError, match="A100 does not support fp8 matrix multiplications: choose a device"):
        planned_device({"MEGATRON_PLAN_DEVICE": "A100"}).tflops("fp8")


def test_here_is_this_machine() -> None:
    device = planned_device({"MEGATRON_PLAN_DEVICE": "here"})
    if torch.cuda.is_available():
        assert device.name in torch.cuda.get_device_name()
        return
    table = planned_device({"MEGATRON_PLAN_DEVICE": "cpu"})
    assert device.name == "cpu" and device.devices_per_node == os.cpu_count()
    assert device.memory_bytes == pytest.approx(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    # Link speeds come from the table, while GEMMs and copies are measured.
    assert device.node_gb_s == table.node_gb_s and device.fp32_tflops != table.fp32_tflops
    assert 1e-4 < device.fp32_tflops < 100 and 0 < device.attainable_attention <= 1 and device.kernel_us > 0


def test_figures_of_ones_own_go_before_those_that_come_along(tmp_path: Path) -> None:
    own = _file(tmp_path, {"H100": {**ENTRIES["H100"], "memory_gib": 94}, "mine": ENTRIES["A100"]})
    devices = known_devices({"MEGATRON_DEVICES": str(own)})
    assert [one.name for one in devices][:3] == ["H100", "mine", "GB200"]
    assert len(devices) == len(ENTRIES) + 1
    assert planned_device({"MEGATRON_DEVICES": str(own)}).memory_bytes == 94 * 2**30


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        (
            "fp32_tflops",
            "fast",
            "H100.fp32_tflops is 'fast': must be a number above 0 and up to 1000000, in 10^12 operations per second",
        ),
        (
            "bf16_tflops",
            0,
            "H100.bf16_tflops is 0: must be a number above 0 and up to 1000000, in 10^12 operations per second, "
            "or null for none",
        ),
        (
            "fp32_tflops",
            None,
            "H100.fp32_tflops is None: must be a number above 0 and up to 1000000, in 10^12 operations per second",
        ),
        ("attainable_link", 80, "H100.attainable_link is 80: must be a number above 0 and up to 1"),
        ("memory_gib", float("nan"), "H100.memory_gib is nan: must be a number above 0 and up to 1000000, in GiB"),
        (
            "memory_gb_s",
            True,
            "H100.memory_gb_s is True: must be a number above 0 and up to 1000000, in 10^9 bytes per second",
        ),
        (
            "memory_gib",
            10**400,
            f"H100.memory_gib is {10**400}: must be a number above 0 and up to 1000000, in GiB",
        ),
        ("devices_per_node", 2.5, "H100.devices_per_node is 2.5: must be a whole number of at least 1"),
        ("kernel_us", -1, "H100.kernel_us is -1: must be a number of at least 0 and up to 1000000, in microseconds"),
        (
            "memory_gb_s",
            3.35e12,
            "H100.memory_gb_s is 3350000000000.0: must be a number above 0 and up to 1000000, in 10^9 bytes per second",
        ),
        ("memory_gbs", 80, "H100.memory_gbs is unknown; did you mean memory_gb_s?"),
    ],
)
def test_a_wrong_figure_is_named_with_what_would_be_right(
    tmp_path: Path, field: str, value: object, right: str
) -> None:
    own = _file(tmp_path, {"H100": {**ENTRIES["H100"], field: value}})
    with pytest.raises(ValueError) as error:
        planned_device({"MEGATRON_DEVICES": str(own)})
    assert str(error.value) == f"{own}: {right}"


def test_files_that_hold_no_devices_are_named(tmp_path: Path) -> None:
    missing = {field: value for field, value in ENTRIES["H100"].items() if field != "kernel_us"}
    for text, right in (
        ({"H100": missing}, "H100.kernel_us is missing: must be a number of at least 0"),
        ({"H100": 80}, "H100 is 80: must be a mapping with bf16_tflops"),
        ("", "has no devices"),
        ("- H100", "has no devices"),
        ("H100: {", "while parsing"),
    ):
        own = _file(tmp_path, text)
        with pytest.raises(ValueError) as error:
            devices_of_file(own)
        assert str(error.value).startswith(str(own)) and right in str(error.value)
    with pytest.raises(ValueError, match="absent.yaml: No such file"):
        devices_of_file(tmp_path / "absent.yaml")
