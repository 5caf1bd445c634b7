"""The keeper: the small parent of a node's processes. Standard library only."""
