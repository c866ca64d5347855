"""Who calls, and what they may do: certificates, tokens, and the file that grants callers their roles."""
