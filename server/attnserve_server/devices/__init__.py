"""Devices: they stage batches, run kernels and bring the results back. `open_device` opens the one asked for."""

from attnserve_server.devices.device import BatchResult, Device, DeviceError, RequestResult, open_device

__all__ = ["BatchResult", "Device", "DeviceError", "RequestResult", "open_device"]
