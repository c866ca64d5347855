"""The services of gRPC: calls and streams in, replies and errors out."""
