"""Small tokenizers of every kind, in the file layouts of public models."""

import functools
import io
import json
import tempfile
from pathlib import Path

import sentencepiece
import tokenizers
from data_helpers import SENTENCES, tokenizer_path
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from deberta_ds.corpus.documents import ReadOptions, plan_units
from deberta_ds.corpus.recipe import TokenizerRecipe
from deberta_ds.corpus.train_tokenizer import train_tokenizer
from deberta_ds.tokenizer import Tokenizer
from deberta_ds.tokenizer.publish import add_special_tokens

BRACKETS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
ANGLES = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
FIRST = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0 to 3 of RoBERTa and XLM-RoBERTa
NAMES = ("pad", "cls", "sep", "unk", "mask")
TEXTS = list(SENTENCES * 4)
ODD = (*SENTENCES, "", " ", "\r\n\u2028\x85 x \u2028", "ﬁ ½ Ａ x\u200by", "x" * 500,
       "  two  spaces\u00a0and a soft\u00adhyphen, cafe\u0301 f(x)=3.14e-5; # !?\r\n",
       "\ttab\t\tthere 😀 नमस्ते ไทย \U000e0001", "   leading, <extra>the quick brown<tool> fox  ",
       "def f(x):\n    return x", "\ufeff\u200bThe fox", "\x01\x02 The fox", "tab\x1cfile\x1fsep",
       "日本 \u3000x \U0001f600\U0001f468\u200d\U0001f469 한국어", "don't (stop) it_is 12.5%")


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
        models.BPE(), trainers.BpeTrainer(vocab_size=600, special_tokens=list(special),
                                          show_progress=False,
                                          initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=prefix),
        decoder=decoders.ByteLevel())


def _save(directory: Path, fast, settings: dict, *, is_vocabulary: bool = False) -> Path:
    directory.mkdir(parents=True)
    if is_vocabulary:
        fast.model.save(str(directory))
    else:
        fast.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def roberta(directory: Path, prefix: bool = False) -> Path:
    """Ids 0..4 are <s> <pad> </s> <unk> and, last, <mask>, which takes the space before it."""
    fast = _byte_level_bpe(FIRST, prefix)
    fast.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True, special=True)])
    fast.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, prefix)
    return _save(directory, fast, _settings(ANGLES, "RobertaTokenizer", add_prefix_space=prefix))


roberta_prefix = functools.partial(roberta, prefix=True)


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
    return _save(directory, fast, {"do_lower_case": False, "vocab_type": "gpt2",
                                   "tokenizer_class": "DebertaTokenizer"}, is_vocabulary=True)


def qwen(directory: Path) -> Path:
    """A regular expression of its own before the bytes, merges as "a b", NFC; tokens of another
    trade, to which --add_mask adds all five roles behind an added token in mid-vocabulary.
    """
    words = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
             r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    fast = _train(
        models.BPE(), trainers.BpeTrainer(vocab_size=600, show_progress=False,
                                          initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
        normalizers.NFC(), pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        decoders.ByteLevel())
    fast.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    fast.add_tokens([tokenizers.AddedToken("<tool_call>", lstrip=True, rstrip=True)])
    fast.post_processor = processors.ByteLevel(trim_offsets=False)
    parts = json.loads(fast.to_str())
    parts["model"]["merges"] = [" ".join(merge) for merge in parts["model"]["merges"]]
    bare = directory.with_name(directory.name + "-bare")
    bare.mkdir(parents=True)
    (bare / "tokenizer.json").write_text(json.dumps(parts))
    (bare / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": None, "bos_token": None,
        "add_prefix_space": False}))
    add_special_tokens(bare, directory)
    return directory


def _wordpiece(lower: bool, prefix: str = "##"):
    return _train(
        models.WordPiece(unk_token="[UNK]", continuing_subword_prefix=prefix),
        trainers.WordPieceTrainer(vocab_size=300, show_progress=False,
                                  continuing_subword_prefix=prefix,
                                  special_tokens=["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]",
                                                  "[MASK]"]),
        normalizers.BertNormalizer(lowercase=lower), pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(prefix))


def bert(directory: Path, lower: bool = True) -> Path:
    """WordPiece; ids are those of its own order, [MASK] among the first."""
    fast = _wordpiece(lower)
    fast.post_processor = processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3))
    return _save(directory, fast, _settings(BRACKETS, "BertTokenizer", do_lower_case=lower))


def bert_vocab_txt(directory: Path) -> Path:
    """vocab.txt alone, as the first releases of BERT."""
    return _save(directory, _wordpiece(False), {
        "do_lower_case": False, "tokenizer_class": "BertTokenizer"}, is_vocabulary=True)


def wordpiece_other(directory: Path) -> Path:
    """WordPiece that marks what continues a word with two at-signs."""
    return _save(directory, _wordpiece(False, "@@"), _settings(BRACKETS, "PreTrainedTokenizerFast"))


def unigram(directory: Path) -> Path:
    """Unigram with Metaspace, <s> and </s>, as XLM-RoBERTa."""
    fast = _train(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=400, show_progress=False, unk_token="<unk>",
                                special_tokens=[*FIRST, "<mask>"]),
        normalizers.NFKC(), pre_tokenizers.Metaspace(), decoders.Metaspace())
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)])
    return _save(directory, fast, _settings(ANGLES, "PreTrainedTokenizerFast"))


def unigram_bytes(directory: Path) -> Path:
    """Unigram that spells in bytes what it does not know; words are parted, then marked."""
    fast = _train(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=400, show_progress=False, unk_token="<unk>",
                                special_tokens=["<pad>", "</s>", "<unk>"]),
        normalizers.Sequence([normalizers.NFKC(),
                              normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]))
    vocabulary = json.loads(fast.to_str())["model"]["vocab"]
    known = {piece for piece, _ in vocabulary}
    vocabulary += [[piece, -20.0] for piece in map("<0x{:02X}>".format, range(256))
                   if piece not in known]
    fast.model = models.Unigram([tuple(entry) for entry in vocabulary], unk_id=2,
                                byte_fallback=True)
    fast.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                      decoders.Fuse()])
    fast.add_special_tokens(["<cls>", tokenizers.AddedToken("<mask>", lstrip=True, special=True)])
    names = ("<pad>", "<cls>", "</s>", "<unk>", "<mask>")
    return _save(directory, fast, _settings(names, "PreTrainedTokenizerFast"))


def llama(directory: Path) -> Path:
    """BPE with the space mark over whole texts and bytes for the rest; <pad> and <mask> added."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = _train(
        models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False,
                            limit_alphabet=70),
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
    return _save(directory, fast, _settings(ANGLES, "PreTrainedTokenizerFast", bos_token="<s>",
                                            eos_token="</s>"))


def _sentencepiece(path: Path, **options) -> Path:
    model, texts = io.BytesIO(), TEXTS * 5
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, hard_vocab_limit=False, minloglevel=2,
        num_threads=1, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())
    return path


def sentencepiece_albert(path: Path) -> Path:
    """Unigram with a normalizer; [CLS], [SEP] and [MASK] are ids 2 to 4, unknown text is [UNK]."""
    return _sentencepiece(path, model_type="unigram", vocab_size=400,
                          normalization_rule_name="nmt_nfkc_cf",
                          pad_id=0, unk_id=1, bos_id=-1, eos_id=-1,
                          control_symbols=["[CLS]", "[SEP]"], user_defined_symbols=["[MASK]"])


def sentencepiece_v3(path: Path, **options) -> Path:
    """DeBERTa's special ids, and a normalizer of its own, as the public v2 and v3."""
    return _sentencepiece(path, **{"model_type": "unigram", "vocab_size": 400} | options,
                          pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]",
                          bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]")


def sentencepiece_bpe(path: Path) -> Path:
    """A SentencePiece BPE model with DeBERTa's special ids."""
    return sentencepiece_v3(path, model_type="bpe", vocab_size=656, byte_fallback=True)


def sentencepiece_t5(path: Path) -> Path:
    """No token for cls and mask; pieces that a user defined."""
    return _sentencepiece(path, model_type="unigram", vocab_size=400, pad_id=0, eos_id=1,
                          unk_id=2, bos_id=-1, user_defined_symbols=["<extra>", "quick brown"])


def sentencepiece_llama(path: Path) -> Path:
    """BPE that keeps line ends and runs of spaces; no token for pad and mask."""
    return _sentencepiece(path, model_type="bpe", vocab_size=700, byte_fallback=True,
                          normalization_rule_name="identity", remove_extra_whitespaces=False,
                          allow_whitespace_only_pieces=True, user_defined_symbols=["  ", "<tool>"])


SENTENCEPIECE = {"albert": sentencepiece_albert, "v3": sentencepiece_v3, "t5": sentencepiece_t5,
                 "llama_spm": sentencepiece_llama, "spm_bpe": sentencepiece_bpe}
MAKERS = {"roberta": roberta, "roberta_prefix": roberta_prefix, "modernbert": modernbert,
          "deberta_v1": deberta_v1, "qwen": qwen, "bert": bert,
          "bert_cased": functools.partial(bert, lower=False), "bert_vocab_txt": bert_vocab_txt,
          "wordpiece_other": wordpiece_other, "unigram": unigram, "unigram_bytes": unigram_bytes,
          "llama": llama}


def trained(directory: Path, lines, name: str = "tokenizer", **recipe) -> Tokenizer:
    """Return a tokenizer of ours, trained on lines of text that are written beside it."""
    (directory / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
    read = ReadOptions("line")
    return train_tokenizer(plan_units([str(directory / "lines.txt")], read), directory / name,
                           TokenizerRecipe(**recipe), read=read)


@functools.cache
def directory_of(name: str) -> Path:
    """Return the directory of one small tokenizer, made once; next to that of a SentencePiece model
    lies the model as its authors have it, their.model.
    """
    if name == "sentencepiece":
        return Path(tokenizer_path())
    place = Path(tempfile.mkdtemp(prefix="deberta_ds_tests_")) / name
    if name in MAKERS:
        return MAKERS[name](place)
    add_special_tokens(SENTENCEPIECE[name](place.with_name("their.model")), place)
    return place
