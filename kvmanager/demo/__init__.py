"""The main job on real input: agent sessions through two nodes, checked against a reference run."""
