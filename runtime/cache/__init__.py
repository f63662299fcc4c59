"""The cache: node shards that wait for their next use, in pinned host memory or on the device."""
