"""Small tokenizers of every kind, in the file layouts of public models."""

import functools
import json
import tempfile
from pathlib import Path

import tokenizers
from data_helpers import SENTENCES, tokenizer_path
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

BRACKETS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
ANGLES = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
NAMES = ("pad", "cls", "sep", "unk", "mask")
TEXTS = list(SENTENCES * 4)  # benchmarks/tokenizer_equality.py takes more, and more pieces
SCALE = 1


def _train(model, trainer, normalizer=None, pre_tokenizer=None, decoder=None):
    fast = tokenizers.Tokenizer(model)
    if normalizer is not None:
        fast.normalizer = normalizer
    fast.pre_tokenizer = pre_tokenizer
    fast.decoder = decoder
    fast.train_from_iterator(TEXTS, trainer)
    return fast


def _settings(names, tokenizer_class, **more) -> dict:
    return {f"{role}_token": name for role, name in zip(NAMES, names, strict=True)} | {
        "tokenizer_class": tokenizer_class} | more


def _byte_level_bpe(special, prefix: bool):
    return _train(
        models.BPE(), trainers.BpeTrainer(vocab_size=600 * SCALE, special_tokens=list(special),
                                          show_progress=False,
                                          initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=prefix),
        decoder=decoders.ByteLevel())


def _save(directory: Path, fast, settings: dict) -> Path:
    directory.mkdir(parents=True)
    fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _vocabulary_files(directory: Path, fast, settings: dict) -> Path:
    directory.mkdir(parents=True)
    fast.model.save(str(directory))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def roberta(directory: Path, prefix: bool = False) -> Path:
    """Ids 0..4 are <s> <pad> </s> <unk> and, last, <mask>, which takes the space before it."""
    fast = _byte_level_bpe(ANGLES[:4], prefix)
    fast.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True, special=True)])
    fast.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, prefix)
    names = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
    return _save(directory, fast, _settings(names, "RobertaTokenizer", add_prefix_space=prefix))


def modernbert(directory: Path) -> Path:
    """Special tokens after the vocabulary, runs of spaces as added tokens, NFC."""
    fast = _byte_level_bpe((), False)
    fast.normalizer = normalizers.NFC()
    fast.add_tokens([tokenizers.AddedToken(" " * n, normalized=True) for n in (8, 4, 2)])
    fast.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]",
                             tokenizers.AddedToken("[MASK]", lstrip=True, special=True)])
    fast.add_tokens(["[unused0]"])
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0",
        special_tokens=[(name, fast.token_to_id(name)) for name in ("[CLS]", "[SEP]")])
    return _save(directory, fast, _settings(BRACKETS, "PreTrainedTokenizerFast"))


def deberta_v1(directory: Path) -> Path:
    """vocab.json and merges.txt alone, as DeBERTa v1 and GPT-2 have them."""
    fast = _byte_level_bpe(BRACKETS, False)
    return _vocabulary_files(directory, fast, {"do_lower_case": False, "vocab_type": "gpt2",
                                               "tokenizer_class": "DebertaTokenizer"})


def _wordpiece(lower: bool):
    return _train(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=500 * SCALE, show_progress=False,
                                  special_tokens=["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]",
                                                  "[MASK]"]),
        normalizers.BertNormalizer(lowercase=lower), pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece())


def bert(directory: Path, lower: bool = True) -> Path:
    """WordPiece; ids are those of its own order, [MASK] among the first."""
    fast = _wordpiece(lower)
    fast.post_processor = processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3))
    return _save(directory, fast, _settings(BRACKETS, "BertTokenizer", do_lower_case=lower))


def bert_vocab_txt(directory: Path) -> Path:
    """vocab.txt alone, as the first releases of BERT."""
    return _vocabulary_files(directory, _wordpiece(False), {
        "do_lower_case": False, "tokenizer_class": "BertTokenizer"})


def unigram(directory: Path) -> Path:
    """Unigram with Metaspace, <s> and </s>, as XLM-RoBERTa."""
    fast = _train(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=400 * SCALE, show_progress=False, unk_token="<unk>",
                                special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"]),
        normalizers.NFKC(), pre_tokenizers.Metaspace(), decoders.Metaspace())
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)])
    names = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
    return _save(directory, fast, _settings(names, "PreTrainedTokenizerFast"))


def llama(directory: Path) -> Path:
    """BPE with the space mark over whole texts and bytes for the rest; <pad> and <mask> added."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = _train(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        trainers.BpeTrainer(vocab_size=900 * SCALE, special_tokens=special, show_progress=False,
                            limit_alphabet=70 * SCALE),
        None, pre_tokenizers.Metaspace(prepend_scheme="always", split=True))
    parts = json.loads(fast.to_str())
    parts["added_tokens"] = parts["added_tokens"][:3]  # byte pieces are pieces, not special tokens
    parts["pre_tokenizer"] = None
    parts["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}
    fast = tokenizers.Tokenizer.from_str(json.dumps(parts))
    fast.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                      decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    fast.add_special_tokens(["<pad>", "<mask>"])
    settings = _settings(("<pad>", "<s>", "</s>", "<unk>", "<mask>"), "PreTrainedTokenizerFast",
                         bos_token="<s>", eos_token="</s>")
    return _save(directory, fast, settings)


MAKERS = {
    "roberta": roberta, "roberta_prefix": functools.partial(roberta, prefix=True),
    "modernbert": modernbert, "deberta_v1": deberta_v1, "bert": bert,
    "bert_cased": functools.partial(bert, lower=False), "bert_vocab_txt": bert_vocab_txt,
    "unigram": unigram, "llama": llama,
}


@functools.cache
def directory_of(name: str) -> Path:
    """Return the directory of one small tokenizer, made once."""
    if name == "sentencepiece":
        return Path(tokenizer_path())
    return MAKERS[name](Path(tempfile.mkdtemp(prefix="deberta_ds_tests_")) / name)
