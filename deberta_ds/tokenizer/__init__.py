"""Tokenizers of any kind: SentencePiece models, and whatever Hugging Face `tokenizers` runs.

tokenizer.py what the rest of the project uses; files.py which files a path means; roles.py special
tokens; words.py where words start; kinds.py, fast.py `tokenizers`; spm.py SentencePiece.
"""

from deberta_ds.tokenizer.spm import MASK_TOKEN, SPECIAL_TOKENS
from deberta_ds.tokenizer.tokenizer import Tokenizer, unknown_tokens
from deberta_ds.tokenizer.words import SPACE_MARK, UNSPACED_SCRIPTS

__all__ = ["MASK_TOKEN", "SPACE_MARK", "SPECIAL_TOKENS", "UNSPACED_SCRIPTS", "Tokenizer",
           "unknown_tokens"]
