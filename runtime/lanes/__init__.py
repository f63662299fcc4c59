"""The lanes beside compute: streams or threads, and the order of their tasks."""
