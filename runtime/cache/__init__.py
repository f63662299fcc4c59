"""Memory for copies: pinned host memory, how full the device is, and home shards that go to and fro.

The copies themselves are in `runtime.buckets.bucket_cache`.
"""
