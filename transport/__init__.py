"""Executors that carry out copy plans: cpu, nixl and fake."""
