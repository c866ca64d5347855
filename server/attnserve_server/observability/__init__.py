"""What operators see of the server: metrics, traces, log lines, health."""
