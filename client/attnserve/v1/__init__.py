"""Generated from protos/attnserve/v1 by `make protos`."""
