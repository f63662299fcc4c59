"""From partitioned graphs to plans: which buckets a model has, and what its graphs will do with them."""
