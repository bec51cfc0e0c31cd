"""deberta_ds: pretrain, resume, export and fine-tune DeBERTa models on DeepSpeed."""

__version__ = "0.1.0"
