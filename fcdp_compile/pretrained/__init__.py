"""Checkpoints as Hugging Face writes them: into home shards and out of them, tensor by tensor."""
