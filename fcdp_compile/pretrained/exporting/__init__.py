"""`save_pretrained`: a sharded model as Transformers and PEFT write theirs."""
