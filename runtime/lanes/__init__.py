"""The lanes beside compute: streams or threads, and the order of what runs on them."""
