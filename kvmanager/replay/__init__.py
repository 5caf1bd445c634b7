"""Recorded agent sessions against the core in virtual time: what a pool size and a policy are worth."""
