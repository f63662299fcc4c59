"""Checkpoints of a whole job: `save` and `load`, sharded, atomic, onto any other N x g and strategy.

    folder/
      checkpoint.json                     describes the checkpoint; renamed into place as the last step
      data-0f3c…/rank-00000.safetensors   written by rank 0: rows of parameters, moments, its own values
      data-0f3c…/rank-00001.safetensors   …

[Note: whose format] torch.distributed.checkpoint (DCP) plans and reshards too.  But its index is a pickle,
which is unsafe to load.  Its Hugging Face storage has neither checksums nor a moment at which a checkpoint
becomes the new one, and it writes values into the model while it still reads.  The rest of DCP's work,
finding the rows that two layouts share, is a few lines of arithmetic: `record`.  Many tools open safetensors.

Modules: `tree` values as JSON · `record` checkpoint.json, and which rows a rank writes and needs · `contents`
everything to save · `disk` files, written in an order that survives a kill, and verified when they are read ·
`saving` with the protocol between ranks · `comparing` · `loading` · `optimizers` both ways.
"""
