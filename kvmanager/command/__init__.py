"""The `kvmanager` command."""
