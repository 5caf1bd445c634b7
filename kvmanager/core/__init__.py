"""The deterministic state machine: events in, effects out, no I/O, no clock, no randomness."""
