"""The tables that the commands print."""
