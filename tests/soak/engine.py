"""`python -m tests.soak.engine`: the engine of the kill tests, which also serves texts that it is told."""

from __future__ import annotations

from typing import Any

from tests.chaos.content import Text
from tests.chaos.engine import ChaosEngine, main
from tests.soak.text import SessionText


class SoakEngine(ChaosEngine):
    """Texts come with the orders; the last few can be looked at again."""

    def play(self, text: dict[str, Any], export: bool) -> dict[str, Any]:
        """Prefills a recorded prompt."""
        return self._prefill(self._known(text), export)

    def take(self, text: dict[str, Any], ticket: str) -> dict[str, Any]:
        """Decodes one that was handed over."""
        return self._decode(self._known(text), ticket)

    def _known(self, text: dict[str, Any]) -> Text:
        made = SessionText(text["play"], tuple(text["nodes"]), text["number"])
        return made  # type: ignore[return-value]  # has all that a Text has


if __name__ == "__main__":
    main(SoakEngine)
