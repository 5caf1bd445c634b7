"""kvmanager: a per-node daemon that owns the KV-cache memory of an LLM serving machine."""

__version__ = "0.1.0"
