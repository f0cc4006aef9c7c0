"""Device rates from which a step's seconds are computed: measured, or guessed from datasheets.

The H200's four rates were fitted on four measured steps of an 8B model, and predict other steps
within 5 %. The H100's rates are the H200's compute, with the measured bandwidth and link of one
H100. Its steps are predicted within 3 % (`tests/planner/test_seconds.py`). Rates of other devices
come from two shares of their datasheets. The same kernels of plain torch run everywhere and reach
61 % of an H200's memory bandwidth. Attention reaches a share of the dense FLOP/s that depends on
the architecture. A guess has no measured rate as its base; `streambp plan --measure-device`
measures. TFLOP/s are the datasheets' dense ones in bf16 with float32 sums.

Links between GPUs are guesses for every device. NVLink counts with 80 % of its bandwidth each way
(H100 and H200 450 GB/s, A100 300, B200 900; MI300X's links 448). GPUs without NVLink have PCIe's
rate. Links between nodes count with 85 % of an adapter of 400 Gb/s for each GPU (A100 200; PCIe and
workstation GPUs 100).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streambp.errors import ConfigError, StreamBPError
from streambp.fields import check_fields
from streambp.reporting import reason

DISPATCH_SECONDS = 11e-6  # host seconds for one torch operation
RATE_FIELDS = ("products", "forward", "backward", "bandwidth", "link")
LINK_FIELDS = ("peers", "network", "node")
MIN_RATE = 1e-12  # smallest rate, above zero


@dataclasses.dataclass(frozen=True)
class Rates:
    """Speeds that a device reaches within a training step.

    Attributes:
        name: the device's name.
        products: FLOP/s of matrix products.
        forward: FLOP/s of attention's forward, counted over computed pairs of query and key.
        backward: FLOP/s of attention's backward, counted over computed pairs of query and key.
        bandwidth: bytes/s, read and written, of operations that are neither matrix products nor
            attention.
        link: bytes/s to the host, and from the host at the same time.
        dispatch: seconds for which the host's Python is busy with one operation.
        guess: True if some of the rates are guesses.
        source: the origin of the rates.
        peers: bytes/s of a GPU to other GPUs of its node, and from them at the same time; a guess.
        network: bytes/s of a GPU between nodes.
        node: GPUs in one node.
        assumed: True if the user named no device. The rates are then those of a usual device with
            about the memory for which the user plans.
    """

    name: str
    products: float
    forward: float
    backward: float
    bandwidth: float
    link: float
    dispatch: float = DISPATCH_SECONDS
    guess: bool = False
    source: str = ""
    peers: float = 360e9
    network: float = 42.5e9
    node: int = 8
    assumed: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self, node=1, **dict.fromkeys((*RATE_FIELDS, "dispatch", *LINK_FIELDS[:2]), MIN_RATE)
        )


def _row(
    name: str,
    products: float,
    forward: float,
    backward: float,
    bandwidth: float,
    link: float,
    source: str,
    guess: bool = False,
    peers: float = 360,
    network: float = 42.5,
) -> Rates:
    """Return the `Rates` of a device, converted from the units of the table `RATE_TABLE` to FLOP/s
    and bytes/s.

    Args:
        name: the device's name.
        products, forward, backward: TFLOP/s of matrix products, attention forward and attention
            backward.
        bandwidth: TB/s of device memory.
        link, peers, network: GB/s to the host, to other GPUs of a node, and between nodes.
        source: the origin of the numbers.
        guess: True if some of the numbers are guesses.
    """
    rates = {"products": products, "forward": forward, "backward": backward, "bandwidth": bandwidth}
    links = {"link": link * 1e9, "peers": peers * 1e9, "network": network * 1e9}
    fields: dict[str, Any] = {field: rate * 1e12 for field, rate in rates.items()} | links
    return Rates(name, **fields, guess=guess, source=source)


def _datasheet_row(
    name: str,
    products: float,
    bandwidth: float,
    like: str,
    link: float,
    peers: float = 0.0,
    network: float = 0.0,
) -> Rates:
    """Return guessed speeds of a device that was not measured. The datasheet's peak speeds are
    multiplied by the fractions that a measured device of similar architecture reaches.

    Args:
        name: the device's name.
        products: dense bf16 TFLOP/s in the datasheet.
        bandwidth: TB/s of device memory in the datasheet.
        like: key of `PEAK_SHARES`, the device of similar architecture.
        link: GB/s to the host.
        peers: GB/s to other GPUs of the node; 0: those of `link`.
        network: GB/s between nodes; 0: those of a slow adapter.
    """
    shares = PEAK_SHARES[like]
    flops = [round(share * products) for share in shares]
    source = f"{products:,g} TFLOP/s and {bandwidth:g} TB/s, shares of {like}"
    bandwidth_here = round(MEMORY_SHARE * bandwidth, 2)
    links = (peers or link, network or NETWORK_RATE)
    return _row(name, flops[0], flops[1], flops[2], bandwidth_here, link, source, True, *links)


# shares of dense TFLOP/s: matrix products, attention forward and backward
PEAK_SHARES = {
    "the H200": (0.675, 0.604, 0.546),
    "the H100 PCIe": (0.6, 0.5, 0.45),
    "the A100": (0.8, 0.62, 0.55),
    "the RTX 4090": (0.95, 0.9, 0.8),
    "the B200": (0.68, 0.5, 0.45),
    "the MI300X": (0.5, 0.35, 0.25),
}
MEMORY_SHARE = 0.61
# GB/s each way with both busy. GEN5 was measured on an H200. GEN4 and GEN3 are usual rates of PCIe.
# GRACE is two thirds of the 450 GB/s between Grace and Hopper.
GEN5, GEN4, GEN3, GRACE = 48.7, 22.0, 11.0, 300.0
NETWORK_RATE = 10.6  # GB/s between nodes
RATE_TABLE = (
    _row("H200", 668, 597, 540, 2.94, GEN5, "fitted on four steps of an 8B model; link measured"),
    _row("H100", 668, 597, 540, 2.56, 45.9, "SXM: the H200's compute; bandwidth and link measured on one"),
    _row("H100-PCIe", 454, 378, 340, 1.22, GEN5, "756 TFLOP/s and 2.0 TB/s, the H200's shares with a lower clock", True,
         GEN5, NETWORK_RATE),
    _row("A100", 250, 193, 172, 1.24, GEN4, "80 GB: matmul 271 (ml-engineering, MAMF), FlashAttention-2 at most 73 % and "
         "63 % of 312 (its paper), 61 % of 2.04 TB/s", False, 240, 21.2),
    _row("A100-40GB", 250, 193, 172, 0.95, GEN4, "as the A100, 61 % of 1.56 TB/s", False, 240, 21.2),
    _row("L40S", 217, 181, 163, 0.53, GEN4, "362 TFLOP/s and 0.86 TB/s, shares of the H100 PCIe",
        True, GEN4, NETWORK_RATE),
    _row("RTX4090", 157, 149, 132, 0.61, GEN4, "165 TFLOP/s with float32 sums and 1.008 TB/s, the RTX 5090's shares", True,
         GEN4, NETWORK_RATE),
    _row("RTX5090", 210, 189, 168, 1.09, GEN5, "209.5 TFLOP/s (torch.matmul 224), FlashAttention-2 187-191 by others' "
         "measurements, 61 % of 1.79 TB/s", False, GEN5, NETWORK_RATE),
    _row("RTX3090", 64, 60, 53, 0.57, GEN4, "71 TFLOP/s with float32 sums and 0.936 TB/s, the RTX 5090's shares", True,
         GEN4, NETWORK_RATE),
    _row("B200", 1530, 1125, 1012, 4.9, GEN5, "2,250 TFLOP/s and 8.0 TB/s, the H200's shares", True, 720),
    _row("MI300X", 653, 457, 327, 3.2, GEN5, "1,307 TFLOP/s (matmul 668: ml-engineering, MAMF) and 5.3 TB/s", True, 358),
    _datasheet_row("T4", 65, 0.32, "the H100 PCIe", GEN3),  # float16: the T4 has no bfloat16
    _datasheet_row("L4", 121, 0.3, "the H100 PCIe", GEN4),
    _datasheet_row("A10G", 70, 0.6, "the A100", GEN4),
    _datasheet_row("A30", 165, 0.933, "the A100", GEN4),
    _datasheet_row("A40", 149.7, 0.696, "the A100", GEN4),
    _datasheet_row("A6000", 154.8, 0.768, "the A100", GEN4),
    _datasheet_row("L40", 181, 0.864, "the H100 PCIe", GEN4),
    _datasheet_row("RTX6000Ada", 364, 0.96, "the H100 PCIe", GEN4),
    _datasheet_row("RTXPRO6000", 504, 1.792, "the H100 PCIe", GEN5),
    _datasheet_row("RTX4080", 97.5, 0.717, "the RTX 4090", GEN4),
    _datasheet_row("RTX5070Ti", 87.9, 0.896, "the RTX 4090", GEN5),
    _datasheet_row("RTX5080", 112.6, 0.96, "the RTX 4090", GEN5),
    _datasheet_row("H100-NVL", 835, 3.9, "the H100 PCIe", GEN5),
    _datasheet_row("H20", 148, 4.0, "the H200", GEN5, 360, 42.5),
    _datasheet_row("GH200", 989, 4.0, "the H200", GRACE, 360, 42.5),
    _datasheet_row("B300", 2250, 8.0, "the B200", GEN5, 720, 42.5),
    _datasheet_row("MI325X", 1307, 6.0, "the MI300X", GEN5, 358, 42.5),
    _datasheet_row("MI355X", 2500, 8.0, "the MI300X", GEN5, 430, 42.5),
)  # fmt: skip
DEVICES: Mapping[str, Rates] = {rates.name: rates for rates in RATE_TABLE}
DEFAULT_DEVICE = "H200"
# GB of the usual device of each size
DEVICE_MEMORY_SIZES = {
    "RTX4080": 16,
    "RTX4090": 24,
    "RTX5090": 32,
    "A100-40GB": 40,
    "L40S": 48,
    "H100": 80,
    "RTXPRO6000": 96,
    "H200": 141,
    "B200": 192,
    "MI325X": 256,
    "B300": 288,
}


def device_of(memory: int) -> str | None:
    """Return the name of the most usual device with `memory` bytes of memory; None if no device has
    that size. A size counts as equal if it lies in a range, because datasheets give sizes in GB or
    GiB."""
    matches = (
        name
        for name, size in DEVICE_MEMORY_SIZES.items()
        if 0.95 * size * 1e9 <= memory <= 1.02 * size * 2**30
    )
    return next(matches, None)


def assumed_rates(memory: int) -> Rates:
    """Return the speeds (FLOP/s, bytes/s) of the most usual device with `memory` bytes, to predict
    seconds if the user named no device. If no device has that size, return those of the device with
    the nearest size. `Rates.assumed` is True in the result."""
    name = device_of(memory)
    if name is None:
        name = min(
            DEVICE_MEMORY_SIZES,
            key=lambda device: abs(math.log(DEVICE_MEMORY_SIZES[device] * 1e9 / max(1, memory))),
        )
    return dataclasses.replace(DEVICES[name], assumed=True)


def rates_by_name(name: str) -> Rates | None:
    """Return a device's speeds (FLOP/s, bytes/s) by the name that its driver reports; None for an
    unknown device."""
    longest = ""
    for device in DEVICES:
        pattern = "[ -]?".join(device.replace("-", ""))
        if re.search(rf"\b{pattern}\b", name, re.IGNORECASE) and len(device) > len(longest):
            longest = device
    return DEVICES.get(longest)


def rates_of(name: str | Path | Rates) -> Rates:
    """Return the speeds of a device (`Rates`: FLOP/s, bytes/s) by its name in `DEVICES`, or from a
    file that `streambp plan --measure-device` wrote. A `Rates` object is returned unchanged.

    Raises:
        ConfigError: no device has the name, and no such file exists.
        StreamBPError: the file has other content.
    """
    if isinstance(name, Rates):
        return name
    plain_name = _plain_name(str(name))
    for device, rates in DEVICES.items():
        if _plain_name(device) == plain_name:
            return rates
    if Path(name).suffix == ".json" or Path(name).is_file():
        return read_rates(Path(name))
    matches = difflib.get_close_matches(plain_name, [_plain_name(device) for device in DEVICES], 1)
    hint = next(
        (
            f" Did you mean {device}?"
            for device in DEVICES
            if matches and _plain_name(device) == matches[0]
        ),
        "",
    )
    raise ConfigError(
        f"The device {str(name)!r} is not in the table, which has {', '.join(DEVICES)}.{hint} To "
        "use this device, run `streambp plan --measure-device FILE` on it and pass the file."
    )


def _plain_name(name: str) -> str:
    """Return a device's name for comparison, in lower case and without separators."""
    return name.lower().replace("-", "").replace(" ", "").replace("_", "")


def write_rates(rates: Rates, file: Path) -> None:
    """Write a device's `Rates` to a file as JSON, for `read_rates` on any machine."""
    file.write_text(json.dumps(dataclasses.asdict(rates), indent=2) + "\n", "utf-8")


def read_rates(file: Path) -> Rates:
    """Return the `Rates` of a device from a file that `write_rates` wrote.

    Raises:
        StreamBPError: the file cannot be read, or has other content.
    """
    try:
        fields: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return Rates(
            **{
                field.name: fields[field.name]
                for field in dataclasses.fields(Rates)
                if field.name in fields
            }
        )
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise StreamBPError(
            f"No rates of a device could be read from {str(file)!r} ({reason(error)}). Write such "
            "a file with `streambp plan --measure-device FILE`."
        ) from error
