"""What people and programs see of a node: metrics, health, history and its stories, events for routers."""
