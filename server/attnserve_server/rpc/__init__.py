"""The gRPC services: calls and streams in, replies and errors out."""
