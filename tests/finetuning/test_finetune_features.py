"""Features: spans on the right tokens, windows that lose nothing, only the first text cut."""

import dataclasses
import gc
import os
import tracemalloc

import numpy as np
import pytest
import thread_ranks
import torch
from superglue_helpers import ALL_TASKS, sample, tiny_start

from deberta_ds.base.errors import UserError
from deberta_ds.finetuning import features as module
from deberta_ds.finetuning import inputs as encoding
from deberta_ds.finetuning.features import TooLongError, collate, encode, window_starts
from deberta_ds.finetuning.heads import MentionHead, TaskModel, loss_sum
from deberta_ds.finetuning.predict import num_scores, predictions_of
from deberta_ds.model.backbone import Backbone, init_parameters
from deberta_ds.tasks.layouts import Example, TextSpan, without_highlight_marks
from deberta_ds.tasks.readers import Split, read_split
from deberta_ds.tasks.settings import Settings
from deberta_ds.tasks.tables import Faults
from deberta_ds.tasks.task import task_named


def encoded(name, examples=None, max_length=256, window_overlap=32):
    examples = sample(name).examples if examples is None else examples
    return encode(task_named(name), examples, tiny_start().tokenizer,
                  max_length=max_length, window_overlap=window_overlap)


def model_of(name, seed=1) -> TaskModel:
    model = TaskModel(task_named(name), Backbone(tiny_start().config), Settings(head_dropout=0.0))
    init_parameters(model, 0.2, seed)
    return model.eval()


def shown(feature, row, start, end) -> str:
    return tiny_start().tokenizer.decode(feature.sequences[row][start:end])


@pytest.mark.parametrize("name", ["WiC", "WSC", "ReCoRD"])
def test_span_tokens_spell_the_span(name):
    for feature, example in zip(encoded(name), sample(name).examples, strict=True):
        assert len(feature.spans) == len(example.spans) == feature.num_slots
        for row, slot, start, end in feature.spans:
            span = example.spans[slot]
            wanted = example.sequences[0][span.text][span.start : span.end]
            assert wanted in shown(feature, row, start, end)


def test_rows_have_the_official_shape():
    tokenizer = tiny_start().tokenizer
    for name, texts in (("RTE", 2), ("WiC", 3), ("WSC", 1), ("COPA", 2)):
        for feature in encoded(name):
            for row in feature.sequences:
                assert row[0] == tokenizer.cls_id and row[-1] == tokenizer.sep_id
                assert row.count(tokenizer.sep_id) == texts
    assert all(len(feature.sequences) == 2 for feature in encoded("COPA"))
    (first, second) = encoded("ReCoRD")
    assert first.sequences[0].count(tokenizer.mask_id) == 1


def test_only_the_first_text_is_cut_and_from_its_end():
    (example,) = [Example((0,), (("one two three " * 200, "is it two"),), 1)]
    (feature,) = encoded("RTE", [example], max_length=40)
    tokenizer = tiny_start().tokenizer
    first, second = tokenizer.encode(example.sequences[0][0]), tokenizer.encode("is it two")
    room = 40 - 3 - len(second)
    assert list(feature.sequences[0]) == [1, *first[:room], 2, *second, 2]
    assert feature.cut_tokens == len(first) - room
    with pytest.raises(UserError, match="must be seen together"):
        encoded("RTE", [example], max_length=len(second) + 6)
    with pytest.raises(TooLongError, match=r"train.jsonl:\d: .* 6 of 6 examples do not fit") as e:
        encoded("WSC", max_length=8)
    assert len(encoded("WSC", max_length=e.value.needed)) == 6
    with pytest.raises(TooLongError):
        encoded("WSC", max_length=e.value.needed - 1)


def test_features_are_those_of_encoding_each_text_with_offsets(monkeypatch):
    for name in ALL_TASKS:
        found = encoded(name, max_length=100, window_overlap=16)
        with monkeypatch.context() as context:
            context.setattr(module, "_SPANNED", (task_named(name).layout,))
            context.setattr(module, "_KEPT_TEXTS", 0)
            assert encoded(name, max_length=100, window_overlap=16) == found


def test_large_tables_take_little_memory_and_say_how_far_they_are(tmp_path, monkeypatch):
    rows = 1500
    tiny_start()  # its tokenizer is trained before memory is counted
    (tmp_path / "SST-2").mkdir()
    table = tmp_path / "SST-2" / "train.tsv"
    words = "the stone oven in the house near a river keeps its heat all night long".split()
    dice = np.random.default_rng(1)
    table.write_text("sentence\tlabel\n" + "".join(
        f"{' '.join(dice.choice(words, 60))}\t{row % 2}\n" for row in range(rows)))
    monkeypatch.setattr(encoding, "_SAY_SECONDS", 0.0)
    monkeypatch.setattr(encoding, "_BLOCK_ROWS", 375)
    said: list[str] = []
    tracemalloc.start()
    try:
        split = read_split(task_named("SST-2"), tmp_path, "train", any_size=True)
        features = encoding.encode_split(split, tiny_start(), Settings(), said.append)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert said == [f"  encoding {table}: {share}% of 1,500" for share in (25, 50, 75, 100)]
    assert np.mean([feature.num_tokens for feature in features]) > 90
    shared = sum(len(data) for data, *_ in features._parts)
    assert shared < 700 * rows and max(peak, kept + shared) < 2000 * rows


@pytest.mark.parametrize("name", ["SQuAD-v2.0", "ReCoRD", "WSC"])
def test_each_rank_of_a_node_encodes_a_part_and_has_all(name, monkeypatch):
    monkeypatch.setattr(encoding, "_BLOCK_ROWS", 2)
    where = ("who is it", "It is Anna. " * 20)
    split = sample(name) if name != "SQuAD-v2.0" else Split(task_named(name), "s", tuple(
        Example((n,), (where,), (), (TextSpan(1, 6 + n, 10 + n),), place=f"s:{n}")
        for n in range(5)))
    tokenizer, task = tiny_start().tokenizer, split.task

    def encoded_by(rank: int, max_length: int, faults: bool = False):
        try:
            found = Faults() if faults else None
            features = encoding.encode_split(split, tiny_start(), Settings(
                max_length=max_length, window_overlap=8), print, found)
            return repr([*features]), features.lost, found and found.errors
        except UserError as error:
            return str(error)

    def as_one(max_length: int, faults: Faults | None = None):
        return encode(task, split.examples, tokenizer, max_length=max_length, window_overlap=8,
                      faults=faults)

    opened = len(os.listdir("/proc/self/fd"))
    longest = max(len(row) for feature in as_one(256) for row in feature.sequences)
    fits = repr(as_one(longest))
    assert thread_ranks.run(3, lambda rank: encoded_by(rank, longest)) == [
        (fits, [], None)] * 3
    with pytest.raises(TooLongError) as error:
        as_one(9)
    assert thread_ranks.run(3, lambda rank: encoded_by(rank, 9)) == [str(error.value)] * 3
    if name == "WSC":  # some of it does not fit
        some, faults = longest - 1, Faults()
        kept = as_one(some, faults)
        assert 0 < len(kept) < len(split.examples)
        lost = sorted({*range(len(split.examples))} - {feature.position for feature in kept})
        renumbered = [dataclasses.replace(feature, position=n) for n, feature in enumerate(kept)]
        assert thread_ranks.run(3, lambda rank: encoded_by(rank, some, True)) == [
            (repr(renumbered), lost, faults.errors)] * 3
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == opened


def test_windows_cover_everything():
    for length in range(1, 60):
        for room, overlap in ((10, 4), (8, 0), (20, 10)):
            starts = window_starts(length, room, overlap)
            seen = {i for start in starts for i in range(start, min(start + room, length))}
            assert seen == set(range(length))
            assert all(b - a <= room - overlap for a, b in zip(starts, starts[1:], strict=False))


def test_long_record_passages_score_every_mention():
    """The sample's, with a passage of many windows."""
    (example, _) = sample("ReCoRD").examples
    (text, query), copies = example.sequences[0], 12
    spans = [TextSpan(0, s.start + c * (len(text) + 1), s.end + c * (len(text) + 1))
             for c in range(copies) for s in example.spans]
    passage = "\n".join([text] * copies)
    example = dataclasses.replace(example, sequences=((passage, query),), spans=tuple(spans),
                                  names=example.names * copies)
    (feature,) = encoded("ReCoRD", [example], max_length=64, window_overlap=16)
    assert len(feature.sequences) > 10 and feature.cut_tokens == 0
    assert {slot for _, slot, _, _ in feature.spans} == set(range(len(example.spans)))
    assert all(len(row) <= 64 for row in feature.sequences)
    for row, slot, start, end in feature.spans:
        assert example.names[slot] in shown(feature, row, start, end)
    scores = model_of("ReCoRD")(collate([feature])).scores
    assert scores.shape == (len(example.spans),) and bool(scores.isfinite().all())


def test_a_mention_longer_than_the_overlap_is_scored_too():
    text = "Anna " + "van " * 60 + "Brandt came."
    example = Example((0, 0), ((text, "It was @placeholder."),), None,
                      (TextSpan(0, 0, len(text) - 6),), (text[:-6],), (text[:-6],))
    (feature,) = encoded("ReCoRD", [example], max_length=40, window_overlap=8)
    assert len(feature.sequences) > 2 and len(feature.spans) == 1
    assert model_of("ReCoRD")(collate([feature])).scores.isfinite().all()


def test_highlights_at_the_end_are_seen():
    text = "Filler words are here. " * 60 + "\n@highlight\nParis won the cup"
    start = text.index("Paris")
    example = Example((0, 0), ((without_highlight_marks(text), "@placeholder won."),), None,
                      (TextSpan(0, start, start + 5),), ("Paris",), ("Paris",))
    (feature,) = encoded("ReCoRD", [example], max_length=64, window_overlap=16)
    row, _, low, high = feature.spans[-1]
    assert row == len(feature.sequences) - 1 and "Paris" in shown(feature, row, low, high)
    assert "won the cup" in tiny_start().tokenizer.decode(feature.sequences[-1])


def test_long_multirc_passages_are_read_in_windows_and_averaged():
    text, question = "A stone oven keeps its heat. " * 30, "What is kept? Heat"
    example = Example((0, 0, 0), ((text, question),), 1)
    (feature,) = encoded("MultiRC", [example], max_length=64, window_overlap=16)
    assert len(feature.sequences) > 3 and feature.cut_tokens == 0
    model = model_of("MultiRC")
    whole = model(collate([feature])).scores
    parts = [
        model(collate([dataclasses.replace(feature, sequences=(row,))])).scores
        for row in feature.sequences
    ]
    torch.testing.assert_close(whole, torch.stack(parts).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL_TASKS)
def test_scores_do_not_depend_on_the_batch_and_an_example_of_weight_zero_adds_nothing(name):
    features = encoded(name)[:4]
    model = model_of(name)
    sizes = [num_scores(task_named(name), example) for example in sample(name).examples[:4]]
    together = model(collate(features)).scores.flatten().split(sizes)
    for feature, scores in zip(features, together, strict=True):
        alone = model(collate([feature])).scores.flatten()
        torch.testing.assert_close(alone, scores, rtol=1e-4, atol=1e-5)
    features = [features[i % len(features)] for i in range(3)]
    model(collate(features, [1.0, 1.0, 0.0])).loss_sum.backward()
    padded = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    model(collate(features[:2])).loss_sum.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, padded[key], rtol=1e-4, atol=1e-6)


def test_the_mentions_of_an_answer_are_what_is_learned():
    for feature, example in zip(encoded("ReCoRD"), sample("ReCoRD").examples, strict=True):
        right = {example.names[slot] for slot, label in enumerate(feature.slot_labels) if label}
        wrong = {example.names[slot] for slot, label in enumerate(feature.slot_labels) if not label}
        assert right == set(example.gold) & set(example.names) and wrong and not right & wrong
        batch = collate([feature])
        losses = [loss_sum("mentions", sign * (2 * batch.slot_labels_K - 1), batch)
                  for sign in (1, -1)]
        assert losses[0] < losses[1]


def test_the_mention_head_is_its_formula():
    (feature, _) = encoded("ReCoRD")
    batch = collate([feature])
    torch.manual_seed(0)
    hidden = torch.randn(*batch.input_ids_RL.shape, 32)
    head = MentionHead(32, 0.0).eval()
    scores = head(hidden, batch)
    for row, slot, start, end in feature.spans:
        tokens, cls = hidden[row, start:end], hidden[row, 0]
        weights = torch.softmax(tokens @ cls / 32**0.5, 0)
        vector = torch.nn.functional.gelu(head.dense(weights @ tokens))
        torch.testing.assert_close(scores[slot], head.classifier(vector)[0])


def test_the_best_mentions_string_is_predicted():
    (example, _) = sample("ReCoRD").examples
    scores = np.zeros(len(example.names))
    scores[2] = 1
    assert predictions_of(task_named("ReCoRD"), [example], [scores]) == ["Paul Reyes"]
