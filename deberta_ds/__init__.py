"""deberta_ds: pretrain, resume, export and fine-tune DeBERTa models on DeepSpeed."""

__version__ = "0.2.0.dev0"
