"""The daemon: one process that decides; it owns the core and talks to keeper, movers, engines and other nodes."""
