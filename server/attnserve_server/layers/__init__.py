"""Resident layers: their definitions, the weights that stay on the device, and requests to apply them."""
