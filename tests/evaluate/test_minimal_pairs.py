"""Minimal pairs: readers, scorers against loops in float64, ties, intervals, several ranks."""

import contextlib
import dataclasses
import json
import math
from types import SimpleNamespace

import export_cases
import numpy as np
import pytest
import rank_helpers
import torch
import torch.nn.functional as F
import transformers
from data_helpers import tiny_tokenizer
from hugging_face_models import FAMILIES, decoded_by_transformers, hugging_face, random_values
from launching import ROOT

from deberta_ds.base.errors import UserError
from deberta_ds.evaluate import pair_scores
from deberta_ds.evaluate.pair_scores import cut_work
from deberta_ds.model.backbone import Backbone
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead
from deberta_ds.objectives.build import build_model, objective_of
from deberta_ds.objectives.mlm import queries_of
from deberta_ds.release import model_files
from deberta_ds.release.model_files import exported_word_ids, write_ours, write_tokenizer_files
from deberta_ds.release.reader import LoadedModel, load_backbone
from deberta_ds.report.pages import render
from deberta_ds.tokenizer.sentencepiece_json import build_tokenizer_json
from deberta_ds.tokenizer.words import subword_starts_word
from deberta_ds.tracking.log import read_metrics
from deberta_ds.training import loop
from deberta_ds.training.held_out import score_minimal_pairs
from deberta_ds.training.pairs import MinimalPair, encode_sentences, outcomes

PAIRS = [
    MinimalPair("The quick foxes jump over it.", "The quick foxes jumps over it.", "a", "one"),
    MinimalPair("A row holds whole pieces.", "A row hold whole pieces, and words.", "a", "one"),
    MinimalPair("Unbelievably, it is a long word.", "Unbelievable, it is long word a.", "b", "two"),
    MinimalPair("Символы и лиса 1917!", "Лиса 1917 и символы!", "c", "two"),
]


def as_jsonl(pairs, **names) -> str:
    return "".join(json.dumps({
        "sentence_good": pair.good, "sentence_bad": pair.bad,
        names.get("paradigm", "paradigm"): pair.paradigm,
        names.get("phenomenon", "phenomenon"): pair.phenomenon}) + "\n" for pair in pairs)


def small_config(family: str = "v3"):
    return dataclasses.replace(FAMILIES[family], vocab_size=640, max_position=64)


def masked_model(family: str = "v3") -> LoadedModel:
    config = small_config(family)
    words = random_values(TokenEmbedding(config.vocab_size, config.hidden_size))
    masked_lm = random_values(MaskedLm(config)).eval()
    return LoadedModel(Backbone(config), tiny_tokenizer(), config, (words, masked_lm))


def discriminator() -> LoadedModel:
    config = small_config()
    backbone = random_values(Backbone(config)).eval()
    head = random_values(ReplacedTokenHead(config)).eval()
    return LoadedModel(backbone, tiny_tokenizer(), config, None, head)


def words_of(ids: list[int]) -> list[range]:
    """Return the columns of each word between [CLS] and [SEP], from the pieces' text."""
    pieces = tiny_tokenizer().pieces(ids)
    starts = [k for k in range(1, len(ids) - 1) if k == 1 or subword_starts_word(pieces[k])]
    return [range(start, end)
            for start, end in zip(starts, [*starts[1:], len(ids) - 1], strict=True)]


def transformers_log_probabilities(model: LoadedModel):
    """Return a function (ids with masks, column) -> float64 log p [V], from transformers."""
    words, masked_lm = model.masked_lm
    tensors = {"words.weight": words.weight.detach()} | {
        name: value for name, value in masked_lm.state_dict().items() if name.startswith("trunk")}
    theirs = hugging_face(model.model_config, tensors).double()
    head, table = masked_lm.head.double(), words.weight.double()
    positions = masked_lm.positions.weight.double()

    @torch.no_grad()
    def log_probabilities(ids: list[int], column: int) -> torch.Tensor:
        decoded = decoded_by_transformers(theirs, positions, torch.tensor([ids]))
        state = head.norm(F.gelu(head.dense(decoded[0, column])))
        logits = state @ table.T + head.bias
        return logits[: model.tokenizer.size].log_softmax(-1)

    return log_probabilities


@pytest.fixture(scope="module")
def words_of_transformers(tmp_path_factory):
    """Return a function sentence -> the columns of each word, by word_ids() of AutoTokenizer."""
    path = tmp_path_factory.mktemp("exported")
    write_tokenizer_files(tiny_tokenizer().files, path, 64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def words_of_sentence(sentence: str) -> list[range]:
        numbers = tokenizer(sentence).word_ids()
        assert numbers[0] is numbers[-1] is None
        return [range(numbers.index(number), numbers.index(number) + numbers.count(number))
                for number in sorted(set(numbers[1:-1]))]

    return words_of_sentence


@pytest.mark.parametrize("family, scoring", [("v3", "word"), ("v2_conv", "word_ids")])
def test_pseudo_log_likelihoods_equal_a_loop_over_transformers_layers(
        family, scoring, words_of_transformers):
    model = masked_model(family)
    found, name = pair_scores.score_pairs(model, PAIRS, scoring).scores, f"pll_{scoring}"
    assert set(found) == {name, "pll_token"}
    log_probabilities = transformers_log_probabilities(model)  # turns the heads into float64
    mask_id = tiny_tokenizer().mask_id
    several = 0
    for number, pair in enumerate(PAIRS):
        for side, sentence in enumerate((pair.good, pair.bad)):
            ids = encode_sentences([sentence], tiny_tokenizer(), 64)[0]
            by_word = by_token = 0.0
            for word in words_of(ids) if scoring == "word" else words_of_transformers(sentence):
                several += len(word) > 1
                for column in word:
                    hidden = [mask_id if column <= k < word.stop else token
                              for k, token in enumerate(ids)]
                    by_word += float(log_probabilities(hidden, column)[ids[column]])
                    hidden = [mask_id if k == column else token for k, token in enumerate(ids)]
                    by_token += float(log_probabilities(hidden, column)[ids[column]])
            assert found[name][number, side] == pytest.approx(by_word, rel=1e-5)
            assert found["pll_token"][number, side] == pytest.approx(by_token, rel=1e-5)
    assert several > 5  # words of several pieces, or the two readings are one


def test_the_published_rule_has_other_words_and_masks_unknown_tokens_with_them(
        words_of_transformers):
    """By word_ids() a mark belongs to the word before it; an unknown token is no target."""
    sentence = PAIRS[1].bad
    ids = encode_sentences([sentence], tiny_tokenizer(), 64)[0]
    assert words_of(ids) != words_of_transformers(sentence)
    unknown = tiny_tokenizer().unk_id
    queries = queries_of([[1, 9, unknown, 9, 9, 2]], tiny_tokenizer(), [[0, 0, 0, 1]])
    asked = zip(queries.target, queries.end, queries.by_word, queries.by_token, strict=True)
    assert sorted(map(tuple, asked)) == [(1, 2, False, True), (1, 4, True, False),
                                         (3, 4, True, True), (4, 5, True, True)]


def test_originality_equals_a_loop_over_transformers_layers():
    model = discriminator()
    found = pair_scores.score_pairs(model, PAIRS).scores
    theirs = hugging_face(model.model_config, model.backbone.state_dict()).double()
    head = model.replaced_token_head.double()
    for number, pair in enumerate(PAIRS):
        rows = []
        for side, sentence in enumerate((pair.good, pair.bad)):
            ids = torch.tensor(encode_sentences([sentence], tiny_tokenizer(), 64))
            with torch.no_grad():
                states = theirs(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
                mixed = F.gelu(head.dense(head.norm(states[:, :1] + states)))
                logits = head.classifier(mixed)[0, 1:-1, 0]
            log_p = [math.log(1 / (1 + math.exp(logit))) for logit in logits.tolist()]
            assert found["discriminator_sum"][number, side] == pytest.approx(sum(log_p), rel=1e-5)
            assert found["discriminator_mean"][number, side] == pytest.approx(
                sum(log_p) / len(log_p), rel=1e-5)
            rows.append((ids[0, 1:-1].tolist(), log_p))
        for side, (ids, log_p) in enumerate(rows):
            other = rows[1 - side][0]
            start = 0
            while start < min(len(ids), len(other)) and ids[start] == other[start]:
                start += 1
            end = 0
            while end < min(len(ids), len(other)) - start and ids[-1 - end] == other[-1 - end]:
                end += 1
            assert found["discriminator_differing"][number, side] == pytest.approx(
                sum(log_p[start:len(ids) - end]), rel=1e-5, abs=1e-9)


def test_a_constant_model_gets_exactly_half():
    swapped = [dataclasses.replace(pair, bad=" ".join(reversed(pair.good.split())))
               for pair in PAIRS]
    same_length = [pair for pair in swapped if len(tiny_tokenizer().encode(pair.good))
                   == len(tiny_tokenizer().encode(pair.bad))]
    (words, masked_lm), judge = masked_model().masked_lm, discriminator()
    with torch.no_grad():
        for tensor in (words.weight, masked_lm.head.bias,
                       judge.replaced_token_head.classifier.weight):
            tensor.zero_()
    both = dataclasses.replace(judge, masked_lm=(words, masked_lm))
    assert same_length
    result = pair_scores.summarize(pair_scores.score_pairs(both, same_length), same_length)
    assert set(result) == set(pair_scores.SCORERS) - {"pll_word_ids"}
    for scores in result.values():
        assert scores["accuracy"] == 0.5 and scores["interval"] == [0.5, 0.5]
        assert scores["ties"] == len(same_length)
    # Whatever the lengths, a mean has no preference.
    result = pair_scores.summarize(pair_scores.score_pairs(both, PAIRS), PAIRS)
    assert result["discriminator_mean"]["accuracy"] == 0.5


def test_a_tie_counts_half_rounding_is_a_tie_and_what_is_no_number_is_no_score():
    """A diverged model got 0 % and no word."""
    scores = np.array([[-3.0, -4.0], [-4.0, -3.0], [-5.0, -5.0], [-5.0, -5.0 - 1e-7], [0.0, 0.0],
                       [np.nan, 1.0], [-np.inf, np.nan], [np.inf, np.inf]])
    assert outcomes(scores)[:5].tolist() == [1, 0, 0.5, 0.5, 0.5]
    assert np.isnan(outcomes(scores)[5:]).all()
    model = dataclasses.replace(discriminator(), masked_lm=masked_model().masked_lm)
    with torch.no_grad():
        model.masked_lm[0].weight.fill_(torch.nan)
    with pytest.raises(UserError, match=r"PLL by word \(.*: the score of 'The .* is no number"):
        pair_scores.score_pairs(model, PAIRS)


def test_batches_are_of_one_length_and_hold_every_item_once():
    batches = cut_work(np.array([5, 9, 5, 5]), 10)
    assert [batch.tolist() for batch in batches] == [[1], [0, 2], [3]]


def test_interval_and_means_are_those_of_the_formulas():
    generator = np.random.default_rng(1)
    pairs, outcome = [], []
    for paradigm, phenomenon, share, count in (("p", "x", 0.9, 500), ("q", "x", 0.5, 500),
                                               ("r", "y", 0.2, 250)):
        pairs += [MinimalPair("g", "b", paradigm, phenomenon)] * count
        outcome += (generator.random(count) < share).tolist()
    scores = np.array([[float(good), 0.5] for good in outcome])
    scored = pair_scores.PairScores({"pll_word": scores}, 0, 0, 1.0)
    result = pair_scores.summarize(scored, pairs)["pll_word"]
    means = [np.mean(outcome[:500]), np.mean(outcome[500:1000]), np.mean(outcome[1000:])]
    assert result["accuracy"] == pytest.approx(np.mean(means))
    assert result["phenomena"]["x"]["accuracy"] == pytest.approx(np.mean(means[:2]))
    assert result["paradigms"]["r"]["accuracy"] == pytest.approx(means[2])
    variance = sum(m * (1 - m) / n for m, n in zip(means, (500, 500, 250), strict=True)) / 9
    half = 1.96 * math.sqrt(variance)
    assert result["interval"] == pytest.approx([np.mean(means) - half, np.mean(means) + half],
                                               abs=0.004)
    assert pair_scores.summarize(scored, pairs)["pll_word"] == result


def test_what_cannot_be_scored_is_refused(monkeypatch):
    for model, pairs, scoring, message in (
            (masked_model(), [MinimalPair("word " * 90, "a", "p", "q")], "word", "64 positions"),
            (dataclasses.replace(masked_model(), masked_lm=None), PAIRS, "word", "cannot score se"),
            (discriminator(), PAIRS, "word_ids", "leave --scoring out")):
        with pytest.raises(UserError, match=message):
            pair_scores.score_pairs(model, pairs, scoring)
    with pytest.raises(UserError, match="'\\[MASK\\] is it': the exported tokenizer gives"):
        exported_word_ids(tiny_tokenizer(), ["[MASK] is it"])
    text = json.loads(build_tokenizer_json(tiny_tokenizer())) | {"pre_tokenizer": None}
    monkeypatch.setattr(model_files, "build_tokenizer_json", lambda _: json.dumps(text))
    with pytest.raises(UserError, match="or takes it for one word"):
        exported_word_ids(tiny_tokenizer(), ["It is."])


def test_published_scores_average_to_the_published_overall():
    scores = json.loads(pair_scores.PUBLISHED.read_text())["paradigms"]
    theirs, own = ({"scorers": {"pll_word": {"paradigms": {
        name: {"phenomenon": "all"} for name in names}}}} for names in (scores, ["own"]))
    found = pair_scores.published_scores(theirs)
    overall = [round(100 * column["overall"], 1) for column in found.values()]
    assert overall == [61.2, 69.8, 69.6, 83.0, 88.6]
    assert pair_scores.published_scores(own) == {}


@pytest.mark.parametrize("kind, sharing", [("mlm", "gdes"), ("rtd", "gdes"), ("rtd", "es"),
                                           ("rtd", "nes")])
def test_scores_while_training_are_those_of_the_finished_model(tmp_path, kind, sharing):
    run = export_cases.run_config("v3", kind, embedding_sharing=sharing)
    model = build_model(run, tiny_tokenizer().size)
    model.load_state_dict(export_cases.random_state(model))
    release = export_cases.make_release("v3", kind, embedding_sharing=sharing)
    write_ours(release, tmp_path / "model")
    finished = load_backbone(tmp_path / "model")
    scored = pair_scores.score_pairs(finished, PAIRS)
    name = "pll_word" if kind == "mlm" else "discriminator_sum"
    ids = [encode_sentences([pair.good, pair.bad], tiny_tokenizer(), 64) for pair in PAIRS]
    norm = {"targets": torch.ones(()), "tokens": torch.ones(())}
    with torch.no_grad():
        model.eval()
        found = objective_of(run).sentence_scores(
            lambda batch: model(batch, norm)[1:], [one for pair in ids for one in pair],
            tiny_tokenizer())
    assert np.array(found).reshape(-1, 2) == pytest.approx(scored.scores[name], rel=1e-5)
    shares = score_minimal_pairs(model, objective_of(run), torch.device("cpu"), ids,
                                 [pair.paradigm for pair in PAIRS], tiny_tokenizer())
    assert shares == {"minimal_pairs": pytest.approx(
        pair_scores.summarize(scored, PAIRS)[name]["accuracy"])}


def test_a_request_to_stop_ends_minimal_pairs_of_a_run_at_their_next_forward():
    """No scores are kept, the model trains again, and the loop knows that the evaluation is due."""
    looked, run = [], export_cases.run_config("v3", "mlm")
    model = build_model(run, tiny_tokenizer().size)

    def look():
        looked.append(model.training)
        if len(looked) > 1:
            raise loop._StopError

    pairs = [encode_sentences(["It is.", "It are."], tiny_tokenizer(), 64)] * 99
    inputs = SimpleNamespace(held_out={"a": []}, pairs=(pairs, ["p"] * 99),
                             tokenizer=tiny_tokenizer())
    model.device = torch.device("cpu")
    trainer = SimpleNamespace(run=run, inputs=inputs, engine=model, objective=objective_of(run),
                              meters=SimpleNamespace(during=contextlib.nullcontext), _look=look)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluate", lambda *_: {})
        assert loop.Trainer._evaluate(trainer) is False
    assert trainer.is_cut_short and model.training and looked == [False, False]


def test_the_page_shows_every_score_and_escapes_names():
    pairs = [dataclasses.replace(pair, phenomenon="<b>&") for pair in PAIRS]
    scored = pair_scores.score_pairs(discriminator(), pairs)
    result = pair_scores.describe(scored, pairs, "<script>alert(1)</script>", "own")
    assert "intervals are too narrow" in pair_scores.table(result, {})  # of few pairs
    page = render("pairs.html", result=result, titles=pair_scores.SCORERS,
                  published={"GPT-2": {"overall": 0.83, "<b>&": 0.9}})
    assert "<script>alert" not in page and "&lt;b&gt;&amp;" in page and "GPT-2: 83.0" in page
    for scores in result["scorers"].values():
        assert f"{100 * scores['accuracy']:.1f}" in page


@pytest.mark.multi
def test_two_ranks_score_pairs_while_they_train_under_zero_3(tmp_path):
    tiny = ROOT / "tests/fixtures/tiny_run"
    data = tmp_path / "pairs.jsonl"
    data.write_text(as_jsonl([MinimalPair(f"{word} is here.", f"{word} are here.", word, "p")
                              for word in ("He", "She", "It")]))
    found = {}
    for ranks, stage in ((1, "zero0_fp32"), (2, "zero3_fp32")):
        out = tmp_path / str(ranks)
        rank_helpers.run(ranks, [
            "--config", str(tiny / "rtd/run.toml"), "--deepspeed_config",
            str(ROOT / f"ds_configs/{stage}.json"), f"--out_dir={out}", "--train.steps=2",
            f'--data.sources=[{{path = "{tiny}/train"}}]', f"--data.heldout={tiny}/heldout",
            "--train.eval_every=1", f"--data.tokenizer={tiny}/spm.model", "--optim.warmup_steps=0",
            "--model.hidden_dropout=0", "--model.attention_dropout=0",  # drawn by rank
            f"--evaluate.minimal_pairs={data}"], tmp_path / f"log{ranks}")
        found[ranks] = [record["minimal_pairs"] for record in read_metrics(out / "metrics.jsonl")
                        if record["kind"] == "eval"]
    assert found[1] == pytest.approx(found[2]) and len(found[1]) == 2


@pytest.mark.multi
def test_two_ranks_write_what_one_process_computes(tmp_path):
    short = [MinimalPair(f"{word} is here.", f"{word} are here.", word, "agreement")
             for word in ("He", "She", "It", "Nobody", "This")]
    data, out = tmp_path / "pairs.jsonl", tmp_path / "out"
    data.write_text(as_jsonl(short))
    path = str(ROOT / "tests/fixtures/tiny_run/rtd/export")
    rank_helpers.run(2, ["--model", path, "--data", str(data), "--out", str(out), "--scoring",
                         "word_ids"], tmp_path / "log", ROOT / "launch/minimal_pairs.py")
    result = json.loads((out / "minimal_pairs.json").read_text())
    alone = pair_scores.score_pairs(load_backbone(path, for_text=True), short, "word_ids")
    assert result["ranks"] == 2 and result["scorers"] == pair_scores.summarize(alone, short)
    assert set(result["scorers"]) == set(pair_scores.SCORERS) - {"pll_word"}
    assert "agreement" in (out / "minimal_pairs.html").read_text()
