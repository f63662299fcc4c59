"""Checkpoints of a whole job: `save` and `load`, sharded, atomic, onto any other N x g and strategy.

    folder/
      checkpoint.json                     what the checkpoint is; renamed into place as the last step
      data-0f3c…/rank-00000.safetensors   what rank 0 wrote: rows of parameters, moments, its own values
      data-0f3c…/rank-00001.safetensors   …

[Note: whose format] torch.distributed.checkpoint (DCP) plans and reshards too, but its index is a pickle,
which nobody should have to unpickle, its Hugging Face storage has neither checksums nor a moment at which a
checkpoint becomes the new one, and it writes values into the model while it still reads.  What is left of
it, rows that two layouts share, is `boxes` here, a few lines of arithmetic.  Files are safetensors, which
anybody can open.

Modules: `tree` values as JSON · `record` checkpoint.json · `contents` what there is to save · `disk` files,
in an order that survives being killed · `writing` the protocol between ranks · `saving` · `blocks` reads that
are verified · `boxes` who needs which rows · `comparing` · `load_plan` what a rank is about to load ·
`loading` · `optimizers` and `rng` both ways.
"""
