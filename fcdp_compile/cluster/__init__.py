"""A cluster: the speeds of its links and the free memory of its machines."""
