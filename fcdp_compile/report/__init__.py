"""Reports about a live model: its graphs, its memory, its traffic."""
