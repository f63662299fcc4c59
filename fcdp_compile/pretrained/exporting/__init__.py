"""`save_pretrained`: writes a sharded model in the formats of Transformers and PEFT."""
