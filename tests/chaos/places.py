"""Where the tokens of one request lie: the observer's table of the pressure suites, by a formula of its own."""

from kvmanager.pressure.places import NO_PAGE, Places

__all__ = ["NO_PAGE", "Places"]
