"""Make plans from partitioned graphs: the buckets of a model, and what its graphs do with them."""
