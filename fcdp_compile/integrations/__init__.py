"""fcdp inside other libraries' training loops, one module for each."""

from fcdp_compile.extras import require

# Modules of this package import these libraries at the top; if one is missing, say what to install.
for _library in ("transformers", "accelerate", "peft"):
    require(_library, "fcdp in the Trainer of Hugging Face")
