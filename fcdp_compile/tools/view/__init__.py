"""Show plans to people: as a story, a trace, a page for a browser."""
