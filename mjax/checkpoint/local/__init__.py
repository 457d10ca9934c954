"""The fast tier on the nodes, with copies on peers."""
