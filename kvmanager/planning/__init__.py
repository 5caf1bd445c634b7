"""What a node with so much memory holds: parallel modes, capacities, hand-off times, and a configuration for it."""
