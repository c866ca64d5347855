"""Which servers there are, and which of them a call goes to."""
