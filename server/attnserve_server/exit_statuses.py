"""The exit statuses of a server: how its process ended, for whoever started it. 0 if it was told to stop and all of its
work was done, or if it was not serving yet.
"""

from __future__ import annotations

from typing import Final

CANNOT_START: Final = 1
WRONG_SETTING: Final = 2
"""It cannot start because of a setting, or of the callers file or a file of TLS that a setting names."""
CUT_OFF: Final = 3
"""It did not wait until its work was done."""
DEVICE_FAILED: Final = 4
