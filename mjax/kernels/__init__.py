"""Kernels, a file each, and the one function that chooses among their implementations."""

from mjax.kernels.base.chooser import Choice, Device, choose

__all__ = ["Choice", "Device", "choose"]
