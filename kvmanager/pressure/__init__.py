"""Seeded schedules that drive a live node to the edge, and an outside observer that says what must hold meanwhile.

Everything goes through the public API: gRPC, the attach socket, the operator's views. `docs/pressure.md` tells how to
run it against an engine's own client and how to write a suite.
"""
