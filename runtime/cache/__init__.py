"""What waits for its next use: node shards in pinned host memory or on the device."""
