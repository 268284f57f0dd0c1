"""Devices that are not here, as far as a choice reads them."""

from softbottle.ops.device import Device

H200 = Device("gpu", "NVIDIA H200", "9.0", 132)
H100_PCIE = Device("gpu", "NVIDIA H100 PCIe", "9.0", 114)
A100 = Device("gpu", "NVIDIA A100", "8.0", 108)
CPU = Device("cpu", "cpu")
TPU = Device("tpu", "TPU v5e")
