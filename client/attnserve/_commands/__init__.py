"""The command-line tool `attnserve`."""
