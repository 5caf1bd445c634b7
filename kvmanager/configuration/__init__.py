"""The configuration: one TOML file, checked, and what it makes of this machine's memory."""
