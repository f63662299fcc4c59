"""`save_pretrained` writes a model as Transformers and PEFT do; `stream_state` yields the same tensors."""
