"""What is compared: the same sizes and counts on every side."""

from __future__ import annotations

LOOKUPS = ((4_096, 60), (32_768, 40), (131_072, 20))
"""(prompt tokens, calls)."""
PAGE_BYTES = 319_232
"""64 tokens of 4,988 B here; one object of as many bytes elsewhere."""
PAGES = 60
CAPACITY_PAGES = 240
"""Room of the store that is filled twice over."""
KILLED_OBJECTS = 80
CLIENTS = 4
LOAD_TOKENS = 4_096
LOAD_S = 4.0
NOOPS = 300
