"""How a client is set up: its servers' address, whom it trusts and who it is, what it sends again."""
