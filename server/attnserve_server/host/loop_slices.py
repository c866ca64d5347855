"""How the event loop is divided between what takes long and everybody else.

Whatever may take long on the loop (to read messages, to fork caches, to evict them, to render metrics) is done in
slices, between which the loop turns for others. How often it then turns, or for how long, is for each to say.
"""

from __future__ import annotations

from typing import Final

SLICE_SECONDS: Final = 0.001
"""About how long a slice is. With five times as long for reading, others had about half as many answers beside callers
who send tiny calls without end; and these had fewer, too. With half as long, a busy server did less.
"""
LONGEST_SECONDS: Final = 0.3
"""No slice counts for more: it may have taken longer only because the process was suspended meanwhile."""
