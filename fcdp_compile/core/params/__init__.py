"""One parameter: how it is cut into shards, the DTensor that holds a shard, and the mesh."""
