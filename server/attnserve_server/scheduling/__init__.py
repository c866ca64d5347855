"""When a request runs, and with which others: from admission to the delivery of its result. No torch, no gRPC."""
