"""Devices: they stage batches, run kernels and bring the results back. `open_device` opens the one asked for."""

from attnserve_server.devices.device import Device, DeviceError, open_device

__all__ = ["Device", "DeviceError", "open_device"]
