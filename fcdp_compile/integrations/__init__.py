"""fcdp inside of other people's training loops, one module for each."""

from fcdp_compile.extras import require

# Modules of this package import them at the top; without them, this says what to install.
for _library in ("transformers", "accelerate", "peft"):
    require(_library, "fcdp in the Trainer of Hugging Face")
