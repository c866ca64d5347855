"""What a request means: its header, tensors and options, checked and in canonical form; and its reply. No torch."""
