"""The settings of a client: its servers' address, whom it trusts, how it identifies itself, what it sends again."""
