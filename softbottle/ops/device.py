"""What the choice of an implementation depends on: the device, at hand or elsewhere.

The device is passed in: the mesh's, or that of a machine to compile for. Where a caller
names none, `at_hand` is the one place that asks jax which there is.
"""

import dataclasses
from typing import Self

import jax

HOPPER = "9.0"


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device, and how many of them share a program.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        kind: its name, for example "NVIDIA H200".
        capability: a CUDA GPU's compute capability; "9.0" is Hopper's.
        multiprocessors: of a GPU; 0 if unknown.
        count: devices that the program runs on.
    """

    platform: str
    kind: str = ""
    capability: str | None = None
    multiprocessors: int = 0
    count: int = 1

    @classmethod
    def of(cls, device: jax.Device, count: int = 1) -> Self:
        """The description of jax's device, which may be that of a topology."""
        return cls(
            device.platform,
            device.device_kind,
            getattr(device, "compute_capability", None),
            getattr(device, "core_count", 0),
            count,
        )

    @property
    def has_tf32(self) -> bool:
        """Whether its float32 products are TF32's by default: GPUs since Ampere."""
        major = (self.capability or "").partition(".")[0]
        return major.isdigit() and int(major) >= 8


def at_hand() -> Device:
    """Jax's first device, and how many it has."""
    return Device.of(jax.devices()[0], jax.device_count())
