"""Devices that are not here, as far as the LSTM's choice reads them."""

from typing import NamedTuple


class Fake(NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str | None = None
    core_count: int = 0


H200 = Fake("gpu", "NVIDIA H200", "9.0", 132)
H100_PCIE = Fake("gpu", "NVIDIA H100 PCIe", "9.0", 114)
A100 = Fake("gpu", "NVIDIA A100", "8.0", 108)
CPU = Fake("cpu", "cpu")
