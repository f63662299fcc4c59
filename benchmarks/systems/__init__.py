"""The systems that are compared, and the model that they train."""
