"""Checkpoints as Hugging Face writes them: into home shards and out of them, tensor by tensor."""

from fcdp_compile.extras import require

# Modules of this package import them at the top; without them, this says what to install.
for _library in ("safetensors", "tqdm"):
    require(_library, "reading and writing checkpoints of Hugging Face")
