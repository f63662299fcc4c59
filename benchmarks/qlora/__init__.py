"""QLoRA: fcdp next to its peers, bytes for each element, and the memory of loading."""
