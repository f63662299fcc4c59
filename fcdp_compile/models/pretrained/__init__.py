"""Checkpoints in Hugging Face's format: read into home shards and written from them, tensor by tensor."""

from fcdp_compile.extras import require

# Modules of this package import these libraries at the top; if one is missing, say what to install.
for _library in ("safetensors", "tqdm"):
    require(_library, "reading and writing checkpoints of Hugging Face")
