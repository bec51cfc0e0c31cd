"""Tokenizers as other projects publish them, trained on a few sentences with their libraries."""

import io
from pathlib import Path

import sentencepiece
from data_helpers import SENTENCES
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PIECES = 400


def sentencepiece_bpe(path: Path) -> None:
    """Write a SentencePiece BPE model with DeBERTa's special ids."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20), model_writer=model, model_type="bpe",
        vocab_size=PIECES + 256, byte_fallback=True, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
        pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]",
        hard_vocab_limit=False, minloglevel=2, num_threads=1)
    path.write_bytes(model.getvalue())


def unigram(path: Path) -> None:
    """Write a tokenizer.json as XLM-RoBERTa and T5 have it: <s> </s> <pad> <unk> <mask>."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=PIECES, special_tokens=special, unk_token="<unk>",
                                      show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 20, trainer)
    tokenizer.save(str(path))


def metaspace_bpe(path: Path) -> None:
    """Write a tokenizer.json as Llama has it, bytes for what is unknown, and [MASK] at the end."""
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)])
    # Llama has no pre-tokenizer; without one a trainer would merge over spaces.
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES, show_progress=False,
        special_tokens=special + [f"<0x{value:02X}>" for value in range(256)])
    tokenizer.train_from_iterator(SENTENCES * 20, trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.add_special_tokens(["[MASK]"])
    tokenizer.save(str(path))
