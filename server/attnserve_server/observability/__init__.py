"""What those who run the server see of it: metrics, traces, log lines, health."""
