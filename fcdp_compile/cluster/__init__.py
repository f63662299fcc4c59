"""A cluster: the speeds of its links and how much memory its machines have free."""
