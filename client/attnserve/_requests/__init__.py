"""What is asked for and what comes of it: arguments to encoded requests, replies to results. No I/O."""
