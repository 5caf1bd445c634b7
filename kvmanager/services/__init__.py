"""The daemon's gRPC services: who calls, what may be asked, and messages as the core's events."""
