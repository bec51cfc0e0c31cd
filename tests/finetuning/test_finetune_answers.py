"""Answers in texts: SQuAD's files, scores and thresholds as the official scripts have them."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from superglue_helpers import tiny_start

from deberta_ds.base.errors import UserError
from deberta_ds.finetuning.features import collate, encode
from deberta_ds.finetuning.heads import MARGIN, loss_sum
from deberta_ds.finetuning.models import (
    build_model,
    finetuned_model,
    load_finetuned,
    save_finetuned,
    tokenizer_files,
)
from deberta_ds.finetuning.predict import answer_text, best_threshold, predictions_of
from deberta_ds.model.backbone import init_parameters
from deberta_ds.tasks import metrics
from deberta_ds.tasks.layouts import Example
from deberta_ds.tasks.readers import carve, read_split
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.task import task_named
from deberta_ds.tasks.task_file import load_own_task

V1, V2 = task_named("SQuAD-v1.1"), task_named("SQuAD-v2.0")
ARTICLES = ["The old bridge of Arrow was built in 1802 by Anna Moor. It fell in 1911, and a new "
            "one, the Long Bridge, took its place.",
            "A kettle holds 2.5 litres of water; the U.S. one holds a little less than half.",
            "Zo\u00eb sang \u201cthe winter\u201d at Lake K\u00f6ln \U0001f3bb in May, "
            "and an-other song in June."]
QUESTIONS = [  # (article, question, answers)
    (0, "Who built the bridge?", ["Anna Moor", "Anna Moor."]), (0, "When did it fall?", ["1911"]),
    (0, "What took its place?", ["the Long Bridge", "Long Bridge", "a new one, the Long Bridge"]),
    (0, "Who painted it?", []),
    (1, "How much does it hold?", ["2.5 litres", "2.5 litres of water"]),
    (1, "Whose holds less?", ["the U.S. one", "U.S."]), (1, "Which article stands first?", ["A"]),
    (1, "Why?", []), (2, "Where did she sing?", ["Lake K\u00f6ln \U0001f3bb", "at Lake K\u00f6ln"]),
    (2, "What did she sing?", ["\u201cthe winter\u201d", "the winter"]),
    (2, "Which song?", ["an-other song"]),
]


def document(version: str) -> dict:
    """Return the questions in the official form; v1.1 has only those with an answer."""
    paragraphs = [{"context": text, "qas": []} for text in ARTICLES]
    for number, (article, question, texts) in enumerate(QUESTIONS):
        entry = {"id": f"q{number}", "question": question, "answers": [
            {"text": text, "answer_start": ARTICLES[article].index(text)} for text in texts]}
        if version == "v2.0":
            entry["is_impossible"] = not texts
            if not texts:
                entry["plausible_answers"] = [{"text": "1802", "answer_start": 0}]
        if texts or version == "v2.0":
            paragraphs[article]["qas"].append(entry)
    data = [{"title": "Bridges", "paragraphs": paragraphs[:1]},
            {"title": "Other", "paragraphs": paragraphs[1:]}]
    return {"version": version, "data": data}


@pytest.fixture(scope="module")
def squad(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("squad")
    for version, indent in (("v1.1", None), ("v2.0", 1)):
        text = json.dumps(document(version), indent=indent)
        for split in ("train", "dev"):
            (directory / f"{split}-{version}.json").write_text(text)
    return directory


def examples_of(squad: Path, task) -> tuple[Example, ...]:
    return read_split(task, squad, "val", any_size=True).examples


def test_the_official_files_the_hubs_and_own_tables_give_the_same_examples(squad, tmp_path):
    datasets = pytest.importorskip("datasets")
    wanted = examples_of(squad, V2)
    assert [e.id for e in wanted] == [f"q{n}" for n in range(len(QUESTIONS))]
    for example in wanted:  # characters, not bytes
        for span in example.spans:
            assert example.sequences[0][1][span.start : span.end] == example.gold[0]
    assert [e.gold for e in examples_of(squad, V1)] == [e.gold for e in wanted if e.gold]
    rows = [{"id": f"q{n}", "title": "t", "context": ARTICLES[a], "question": q, "answers": {
        "text": texts, "answer_start": [ARTICLES[a].index(text) for text in texts]}}
        for n, (a, q, texts) in enumerate(QUESTIONS)]
    (tmp_path / "squad_v2").mkdir()
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "squad_v2" / "validation-00000-of-00001.parquet"))
    assert examples_of(tmp_path, V2) == wanted

    table.to_parquet(str(tmp_path / "a.parquet"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "context", "question", "answers", "at"])
        for row in rows:
            firsts = [*row["answers"]["text"][:1], *row["answers"]["answer_start"][:1]]
            writer.writerow([row["id"], row["context"], row["question"], *(firsts or ["", ""])])
    for name in ("a.parquet", "a.jsonl", "a.json", "a.csv", str(squad / "dev-v2.0.json")):
        start = 'start = "at"\n' if name == "a.csv" else ""
        (tmp_path / "task.toml").write_text(
            'name = "mine"\nkind = "spans"\ntexts = ["question", "context"]\nlabel = "answers"\n'
            f'train = "{name}"\nval = "{name}"\n{start}')
        task, said = load_own_task(tmp_path / "task.toml")
        assert said == "mine: 11 questions, 2 without an answer" and task.no_answer
        assert task.metrics == ("f1_v2", "em_v2")
        found = read_split(task, ".", "train").examples
        if name == "a.csv":  # one answer a row
            assert [e.gold for e in found] == [e.gold[:1] for e in wanted]
            assert [e.spans for e in found] == [e.spans for e in wanted]
        else:
            assert found == wanted, name


def test_every_answer_of_a_window_is_found_in_characters_and_the_rest_point_to_cls(squad):
    examples = examples_of(squad, V2)
    tokenizer = tiny_start().tokenizer
    features = encode(V2, examples, tokenizer, max_length=40, window_overlap=12)
    assert sum(len(feature.sequences) > 1 for feature in features) > 4
    for example, feature in zip(examples, features, strict=True):
        question, context = example.sequences[0]
        whole, _ = tokenizer.encode_with_offsets(context)
        seen, targets = set(), np.array(feature.slot_labels, dtype=int).reshape(-1, 2)
        windows = zip(feature.sequences, feature.spans, feature.offsets, targets, strict=True)
        for row, span, offsets, (first, last) in windows:
            low, high = span[2:]
            assert len(row) <= 40 and high - low == len(offsets) and row[high] == tokenizer.sep_id
            asked = tokenizer.encode(question)
            assert list(row[:low]) == [tokenizer.cls_id, *asked, tokenizer.sep_id]
            seen.update(map(tuple, offsets.tolist()))
            if first:
                found = context[offsets[first - low][0] : offsets[last - low][1]]
                assert example.gold[0] in found and len(found) <= len(example.gold[0]) + 2
            assert (first == 0) == (last == 0)
            assert (first > 0) == any(offsets[0][0] <= answer.start and answer.end <= offsets[-1][1]
                                      for answer in example.spans)
        assert len(seen) >= len(set(tokenizer.encode_with_offsets(context)[1])) and whole
        assert bool(targets.any()) == bool(example.gold)  # an answer is whole in some window


def test_a_context_is_never_on_both_sides_of_a_cut(squad, tmp_path):
    whole = read_split(V2, squad, "val", any_size=True)
    train, val = carve(whole, 0.5, seed=1)
    contexts = [{e.sequences[0][1] for e in part.examples} for part in (train, val)]
    assert len(train.examples) + len(val.examples) == 11 and not contexts[0] & contexts[1]
    twice = document("v2.0")
    twice["data"][0]["paragraphs"][0]["qas"][1]["id"] = "q0"
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(twice))
    with pytest.raises(UserError, match="id q0 was already used at .*qas.0."):
        read_split(V2, tmp_path, "val", any_size=True)


def model_and_batch(squad, task=V2, max_length=40, longest=5):
    start = tiny_start()
    model = build_model(task, start, Settings(max_answer_tokens=longest), 1).eval()
    init_parameters(model, 0.3, 5)
    examples = examples_of(squad, task)
    features = encode(task, examples, start.tokenizer, max_length=max_length, window_overlap=12)
    return model, examples, features


def test_the_best_answer_is_that_of_a_loop_over_all_pairs(squad):
    model, examples, features = model_and_batch(squad, longest=2)  # most of the best have more
    batch = collate(features)
    with torch.no_grad():
        found = model(batch).scores
        scores_KL = model.scores(model.sums(batch), batch)
    row = 0
    for feature, numbers, example in zip(features, found, examples, strict=True):
        best, none = (-np.inf,), np.inf
        for span, offsets in zip(feature.spans, feature.offsets, strict=True):
            starts, ends = scores_KL[2 * row].numpy(), scores_KL[2 * row + 1].numpy()
            none = min(none, starts[0] + ends[0])
            for i in range(span[2], span[3]):
                for j in range(i, min(i + 2, span[3])):
                    place = offsets[i - span[2]][0], offsets[j - span[2]][1]
                    best = max(best, (starts[i] + ends[j], *place), key=lambda found: found[0])
            row += 1
        wanted = [*map(float, best), float(none - best[0])]
        assert numbers.tolist() == pytest.approx(wanted, abs=1e-4)
        text = answer_text(example, numbers.numpy(), None)
        assert text == example.sequences[0][1][best[1] : best[2]].strip()
    middle = float(found[:, MARGIN].median()) + 1e-6
    guesses = predictions_of(V2, examples, list(found.numpy()), threshold=middle)
    always = predictions_of(V1, examples, list(found.numpy()))
    margins = found[:, MARGIN].tolist()
    assert 0 < sum(margin > middle for margin in margins) < len(margins)
    assert guesses == ["" if margin > middle else text for margin, text in
                       zip(margins, always, strict=True)]


def test_a_loss_that_is_not_finite_is_no_index_error(squad):
    """A diverged run is counted and named by its loss; a look for its best answer must not fail."""
    model, _, features = model_and_batch(squad)
    torch.nn.init.constant_(model.head.classifier.bias, float("nan"))
    batch = collate(features)
    with torch.no_grad():
        assert not torch.isfinite(model.train()(batch).loss_sum)
        assert not torch.isfinite(model.eval()(batch).scores[:, MARGIN]).any()


def test_the_loss_is_the_mean_over_windows_of_start_and_end(squad):
    model, _, features = model_and_batch(squad)
    batch = collate(features, weights=[0.5] * len(features))
    with torch.no_grad():
        scores_KL = model.scores(model.sums(batch), batch).double()
        found = loss_sum("answer", scores_KL, batch)
    wanted, rest = 0.0, iter(scores_KL)
    for feature in features:
        losses = []
        for number, target in enumerate(feature.slot_labels):
            low, high = feature.spans[number // 2][2:]
            scores_L = next(rest)
            seen = torch.cat([scores_L[:1], scores_L[low:high]])  # [CLS] and the context
            losses.append(seen.logsumexp(0) - scores_L[int(target)])
        wanted += 0.5 * float(torch.stack(losses).mean())
    assert float(found) == pytest.approx(wanted, rel=1e-6)


def test_the_threshold_is_the_best_of_all(squad):
    examples = examples_of(squad, V2)
    dice = np.random.default_rng(3)
    for seed in range(20):
        numbers = []
        for example in examples:
            start = int(dice.integers(len(example.sequences[0][1]) - 9))
            if example.spans and dice.random() < 0.6:
                start = example.spans[0].start
            margin = float(dice.normal(0 if example.gold else 1))
            margin = round(margin, seed % 3)  # some are equal
            numbers.append(np.array([3.0, start, start + 9, margin]))

        def f1(threshold, numbers=numbers):
            guesses = predictions_of(V2, examples, numbers, threshold)
            return metrics.score(V2, examples, guesses)["f1_v2"]

        found = best_threshold(examples, numbers)
        tried = [n[3] + d for n in numbers for d in (-1e-9, 1e-9)]
        assert f1(found) == pytest.approx(max(map(f1, tried)))
        assert f1(found + 1e-7) == f1(found - 1e-7)  # rounding moves no example across it


def test_transformers_answers_as_we_do(squad, tmp_path):
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    model, examples, features = model_and_batch(squad, max_length=128)
    start = tiny_start()
    save_finetuned(tmp_path, V2, Settings(max_answer_tokens=5), start, dict(model.state_dict()),
                   tokenizer_files(start.tokenizer, 256), -3.5)
    theirs, report = AutoModelForQuestionAnswering.from_pretrained(
        tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    saved = load_finetuned(tmp_path)
    assert saved.threshold == -3.5 and saved.task == V2
    ours = finetuned_model(saved, torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        numbers = ours(collate(features)).scores.double().numpy()
    guesses = predictions_of(V2, examples, list(numbers), saved.threshold)
    assert 2 < guesses.count("") < 9
    for example, feature, wanted, row in zip(examples, features, guesses, numbers, strict=True):
        question, context = example.sequences[0]
        inputs = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
        offsets = inputs.pop("offset_mapping")[0].tolist()
        inside = [number == 1 for number in inputs.sequence_ids(0)]
        with torch.no_grad():
            output = theirs.eval()(**inputs)
        first, last = output.start_logits[0], output.end_logits[0]
        pairs = [(float(first[i] + last[j]), i, j) for i in range(len(inside)) if inside[i]
                 for j in range(i, min(i + 5, len(inside))) if inside[j]]
        score, i, j = max(pairs)
        none = float(first[0] + last[0])
        assert inputs.input_ids[0].tolist() == list(feature.sequences[0])
        text = "" if none - score > -3.5 else context[offsets[i][0] : offsets[j][1]].strip()
        # tokenizers gives every piece of a run of bytes the characters of the whole run.
        assert text == wanted or (wanted in text and {"\u00f6", "1"} & set(text))
        assert [score, none - score] == pytest.approx([row[0], row[3]], abs=1e-4)


@pytest.mark.parametrize(("change", "message"), [
    ({"answers": [{"text": "Anna", "answer_start": 3}]}, "not at character 3 .* it is at 45"),
    ({"answers": [{"text": " ", "answer_start": 3}]}, "an answer must be a text, found ' '"),
    ({"answers": []}, "the question has no answer, but SQuAD-v1.1 has one everywhere"),
    ({"question": ""}, 'field "question" is empty'), ({"id": None}, None)])
def test_a_wrong_answer_is_named_with_its_place(tmp_path, change, message):
    whole = document("v1.1")
    whole["data"][0]["paragraphs"][0]["qas"][1] |= change
    if message is None:
        del whole["data"][0]["paragraphs"][0]["qas"][1]["id"]
        message = "not a SQuAD document .*'id'"
    (tmp_path / "train-v1.1.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match=message) as caught:
        read_split(V1, tmp_path, "train", any_size=True)
    assert re.search(r"train-v1.1.json: data\[0\].paragraphs\[0\].qas\[[01]\]", str(caught.value))
    with pytest.raises(UserError, match="looked for .*train-v2.0.json"):
        read_split(V2, tmp_path, "train")
    (tmp_path / "train-v1.1.json").write_text(json.dumps(document("v1.1")))
    with pytest.raises(UserError, match="9 predictions, but the official SQuAD-v1.1 train has"):
        read_split(V1, tmp_path, "train")
