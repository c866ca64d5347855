"""What the server can be told: one frozen dataclass, and how flags and the environment become one."""
