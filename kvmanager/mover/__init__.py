"""The mover: the process that moves bytes for one device."""
