"""The journal: what the core has seen, in memory that outlives the daemon."""
