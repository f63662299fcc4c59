"""Plans for people: a story, a trace, a page for a browser."""
