"""What the node's processes end with."""

from __future__ import annotations

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_REPLACED: Final = 75
"""Of a daemon that shall be started again at once."""
EXIT_INVARIANT: Final = 77
"""Of a daemon that found a broken invariant; the keeper restarts it."""
EXIT_CONFIG: Final = 78
"""As in sysexits.h. A process that ends with it is not restarted before somebody has done something."""
