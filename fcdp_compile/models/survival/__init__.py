"""Training that goes on within seconds after a process or a node has died: `keeper.survive`."""
