"""The config of a run that takes seconds: one layer, random tokens, fp32, each step logged."""

TINY = [
    "model.vocab_size=97",
    "model.hidden_size=32",
    "model.attention.num_attention_heads=4",
    "model.intermediate_size=48",
    "model.num_hidden_layers=1",
    "data.mock=true",
    "data.seq_length=16",
    "train.global_batch_size=4",
    "train.micro_batch_size=4",
    "precision.compute=float32",
    "log.interval=1",
]
