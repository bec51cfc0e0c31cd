"""One line of a task file -> the predictions it asks for, with every field checked.

The formulations are those of the DeBERTa and jiant releases: BoolQ is (passage, question), MultiRC
(passage, question + answer), COPA puts the cause before the effect, WiC is (word, sentence1,
sentence2), ReCoRD marks every entity mention of the passage, SQuAD is (question, context).
Character spans are end-exclusive here; ReCoRD's files count the last character in.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from deberta_ds.tasks.line import Line, glued, show, words_in
from deberta_ds.tasks.task import Task

PLACEHOLDER = "@placeholder"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_HIGHLIGHT = re.compile(r"\s*@highlight\s*")
Label = Any  # a class index, a number, or a tuple of class indices, as `Example.label` says
shared = lru_cache(1 << 16, typed=True)(lambda value: value)  # the places of words recur


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Characters [start, end) of text number `text` of an example's sequence."""

    text: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Example:
    """One prediction to make."""

    key: tuple[int, ...]  # (idx,); MultiRC: (passage, question, answer); ReCoRD: (query, passage)
    sequences: tuple[tuple[str, ...], ...]  # one; COPA: one for each choice
    # Class index; of a regression a number, of several labels 0 or 1 for each, of tags the class of
    # each word, of SQuAD's answers (). None where the file has none.
    label: Label = None
    # WiC and WSC: two; ReCoRD: every mention; tags: every word; SQuAD: the first answer, if any
    spans: tuple[TextSpan, ...] = ()
    names: tuple[str, ...] = ()  # ReCoRD: the string of each mention
    gold: tuple[str, ...] = ()  # ReCoRD and SQuAD: the answer strings
    id: str = ""  # SQuAD: what predictions.json calls the question
    language: str = ""  # SQuAD: by whose rule answers are compared (answer_texts.py)
    group: str | None = None  # the part of the table that it is scored with, if there are any
    place: str = field(default="", compare=False)  # file and line it was read from


def is_labeled(example: Example) -> bool:
    """Return whether an example can be scored."""
    return example.label is not None or bool(example.gold)


def examples_of(task: Task, place: str, value: Any, split: str) -> list[Example]:
    """Return the examples of one JSON object read at `place` (file and line).

    Labels are required in train and val; test lines have none, except the public diagnostics.
    Raises UserError naming the place, the field and the expected format.
    """
    found = _PARSERS[task.layout](Line(task, place, value, split != "test"))
    column = task.columns.get("group")
    group = str(value[column]) if column in value else None
    return [replace(example, place=place, group=group) for example in found]


def _texts(line: Line) -> list[Example]:
    blank = line.task.may_be_blank
    sequence = tuple(line.get(name, str, blank) for name in line.task.texts)
    if not any(text.strip() for text in sequence):
        line.fail(f"{' and '.join(line.task.texts)}: nothing to read")
    return [Example((line.index(),), (sequence,), line.label())]


def _choices(line: Line) -> list[Example]:
    """One answer of several: the text, then what follows it and the answer in one piece."""
    task = line.task
    first, *rest = (line.get(name, str) for name in task.texts)
    fields, number = task.choices, task.first_answer
    while len(fields) > 2 and line.value.get(fields[-1]) in (None, ""):
        fields = fields[:-1]  # fewer answers than other examples have
    answers = line.strings(fields[0]) if len(fields) == 1 else [
        line.get(name, str) for name in fields]
    if not 2 <= len(answers) <= len(task.labels):
        line.fail(f'field "{fields[0]}" has {len(answers)} answers, not 2 to {len(task.labels)}')
    sequences = tuple((first, " ".join([*rest, answer])) for answer in answers)
    if not line.has_label:
        return [Example((line.index(),), sequences)]
    found = chosen(line.value.get("label"), answers, number)
    if found is None:
        line.fail(f'field "{line.named("label")}" must be a number from {number} to '
                  f"{number + len(answers) - 1}, a letter from A to {_LETTERS[: len(answers)][-1]},"
                  f" or the answer itself; found {show(line.value.get('label'))}"
                  f"{line.without_label('label')}")
    return [Example((line.index(),), sequences, found[0])]


def chosen(value: Any, answers: list[str], first: int = 0) -> tuple[int, str] | None:
    """Return (which answer is right, what says so): its number from `first`, its letter, its text.

    A number or letter counts before a text that reads the same, as the official files have those;
    the text of two answers says nothing.
    """
    if type(value) is int and first <= value < first + len(answers):
        return value - first, "number"
    text = str(value) if type(value) in (int, str) else ""
    if len(text) == 1 and text in _LETTERS[: len(answers)]:
        return _LETTERS.index(text), "letter"
    return (answers.index(text), "text") if answers.count(text) == 1 else None


def _tags(line: Line) -> list[Example]:
    name = line.task.texts[0]
    if isinstance(line.value.get(name), str):
        return [_tagged_text(line, line.get(name, str))]
    words, label = line.strings(name), None
    if not any(word.strip() for word in words):
        line.fail(f'field "{name}" has no word')
    if line.has_label:
        tags = line.get("label", list)
        if len(tags) != len(words):
            line.fail(f"{len(tags)} tags for {len(words)} words")
        label = tuple(line.class_index(tag) for tag in tags)
    text, places = glued(words, line.task.spaces)
    return [_tagged(line, text, places, label)]


def _tagged_text(line: Line, text: str) -> Example:
    """A text whose entities are characters [start, end) with a name."""
    task = line.task
    if not line.needed and task.words == "list" and task.spaces:
        # Of a word, such a model knows the first token.
        return _tagged(line, text, words_in(text), None)
    tags = ["O"] * len(text)
    for start, end, name in line.entities():
        tags[start:end] = [f"B-{name}"] + [f"I-{name}"] * (end - start - 1)
    return _tagged(line, text, [(place, place + 1) for place in range(len(text))],
                   tuple(map(line.class_index, tags)) if line.has_label else None)


def _tagged(line: Line, text: str, places: list[tuple[int, int]], label: Label) -> Example:
    spans = tuple(shared(TextSpan(0, start, end)) for start, end in places)
    return Example((line.index(),), ((text,),), label, spans)


def _answers(line: Line) -> list[Example]:
    """An answer inside a text: (question, context); several answers count, the first is learned."""
    question, context = (line.get(name, str) for name in line.task.texts)
    answers = [(text, _answer_start(line, context, text, start))
               for text, start in _given_answers(line)] if line.has_label else []
    if line.needed and not answers and not line.task.no_answer:
        line.fail(f"the question has no answer, but {line.task.name} has one everywhere; of an own "
                  "task: train must have some without an answer, too")
    spans = tuple(TextSpan(1, start, start + len(text)) for text, start in answers[:1])
    gold = tuple(text for text, _ in answers)
    label = () if gold or (line.task.no_answer and "label" in line.value) else None
    return [Example((line.index(),), ((question, context),), label, spans, gold=gold,
                    id=str(line.value.get("id", line.index())),
                    language=line.task.language)]


def _given_answers(line: Line) -> list[tuple[str, Any]]:
    """Return (text, where it starts or None) of every answer of a line, in any of the usual forms.

    {"text": [...], "answer_start": [...]} (the Hub), a list of {"text", "answer_start"} (the
    official files), or one text, with its place in field "start" or without. None where SQuAD v2
    says is_impossible: its answers are only plausible then.
    """
    value = line.value.get("label")
    if line.value.get("is_impossible"):
        return []
    if isinstance(value, str):
        return [(value, line.value.get("start"))] if value else []
    if isinstance(value, dict) and {"text", "answer_start"} <= value.keys():
        texts, starts = value["text"], value["answer_start"]
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            return list(zip(texts, starts, strict=True))
    if isinstance(value, list) and all(isinstance(part, dict) and "text" in part for part in value):
        return [(part["text"], part.get("answer_start")) for part in value]
    line.fail(f"answers must be a text, a list of {{text, answer_start}}, or {{text: [...], "
              f"answer_start: [...]}}; found {show(value)}")


def _answer_start(line: Line, context: str, text: Any, start: Any) -> int:
    """Return where an answer starts in its context; without a number, where it first occurs."""
    name = line.task.texts[1]
    if not isinstance(text, str) or not text.strip():
        line.fail(f"an answer must be a text, found {show(text)}; a question without an answer has "
                  "no entry at all")
    found = context.find(text)
    if start is None and found >= 0:
        return found
    if re.fullmatch(r"\s*\d+(\.0+)?\s*", str(start)):  # 18.0, as pandas writes it
        start = int(float(start))
    if type(start) is int and start >= 0 and context.startswith(text, start):
        return start
    if found < 0:
        line.fail(f'answer {show(text)} is nowhere in field "{name}"; an answer must be a part of '
                  "it, letter by letter")
    line.fail(f'answer {show(text)} is not at character {show(start)} of field "{name}"; it is at '
              f"{found} (characters are counted from 0, not bytes)")


def _copa(line: Line) -> list[Example]:
    premise, question = line.get("premise", str), line.get("question", str)
    if question not in ("cause", "effect"):
        line.fail(f'field "question" must be "cause" or "effect", found {show(question)}')
    choices = [line.get(name, str) for name in ("choice1", "choice2")]
    sequences = tuple(
        (choice, premise) if question == "cause" else (premise, choice) for choice in choices)
    return [Example((line.index(),), sequences, line.label())]


def _multirc(line: Line) -> list[Example]:
    if line.value.get("version") != 1.1:
        line.fail(f'field "version" must be 1.1, found {show(line.value.get("version"))}')
    passage = line.inside("passage")
    text = passage.get("text", str)
    examples = []
    for question in passage.each("questions"):
        words = question.get("question", str)
        for answer in question.each("answers"):
            key = (line.index(), question.index(), answer.index())
            # Eight official answers are blank strings; they are real options with real labels.
            option = answer.get("text", str, may_be_blank=True)
            sequence = (text, f"{words} {option}".rstrip())
            examples.append(Example(key, (sequence,), answer.label()))
    return examples


def _record(line: Line) -> list[Example]:
    passage = line.inside("passage")
    text = passage.get("text", str)
    spans = []
    for e, entity in enumerate(passage.each("entities")):
        start, end = entity.get("start", int), entity.get("end", int) + 1
        if not 0 <= start < end <= len(text):
            entity.fail(f"entity {e} [{start}, {end}) is outside its passage of {len(text)} chars")
        spans.append(TextSpan(0, start, end))
    spans = sorted(set(spans), key=lambda span: (span.start, span.end))
    if not spans:
        passage.fail("the passage has no entities to choose from")
    names = tuple(text[span.start : span.end] for span in spans)
    shown = without_highlight_marks(text)
    examples = []
    for qa in line.each("qas"):
        query = qa.get("query", str)
        if PLACEHOLDER not in query:
            qa.fail(f'field "{qa.key}query" has no {PLACEHOLDER}')
        gold = ()
        if qa.needed or "answers" in qa.value:
            gold = tuple(dict.fromkeys(answer.get("text", str) for answer in qa.each("answers")))
            if qa.needed and not set(gold) & set(names):
                qa.fail(f"no answer of query {qa.index()} is an entity of its passage")
        key = (qa.index(), line.index())
        examples.append(Example(key, ((shown, query),), None, tuple(spans), names, gold))
    return examples


def without_highlight_marks(text: str) -> str:
    r"""Return a ReCoRD passage with each "\n@highlight\n" as a full stop, of the same length."""

    def stop(match: re.Match) -> str:
        before = text[match.start() - 1 : match.start()]
        mark = " " if before in "" or before in ".!?:;\"'" else "."
        return mark.ljust(match.end() - match.start())

    return _HIGHLIGHT.sub(stop, text)


def _wic(line: Line) -> list[Example]:
    sequence = tuple(line.get(name, str) for name in line.task.texts)
    spans = []
    for number in (1, 2):
        start, end = line.get(f"start{number}", int), line.get(f"end{number}", int)
        if not 0 <= start < end <= len(sequence[number]):
            line.fail(
                f'"start{number}" = {start} and "end{number}" = {end} are outside "sentence{number}'
                f'" of {len(sequence[number])} characters')
        spans.append(TextSpan(number, start, end))
    return [Example((line.index(),), (sequence,), line.label(), tuple(spans))]


def _wsc(line: Line) -> list[Example]:
    text, target = line.get("text", str), line.inside("target")
    spans = []
    for number in (1, 2):
        phrase = target.get(f"span{number}_text", str)
        index = target.get(f"span{number}_index", int)
        found = find_phrase(text, phrase, index)
        if found is None:
            target.fail(f'"span{number}_text" {phrase!r} is nowhere near word {index} of the text')
        spans.append(TextSpan(0, *found))
    return [Example((line.index(),), ((text,),), line.label(), tuple(spans))]


def find_phrase(text: str, phrase: str, index: int) -> tuple[int, int] | None:
    """Return the characters [start, end) of `phrase`, given as starting at whitespace word `index`.

    Words are compared on their letters and digits, as case and punctuation differ in 145 official
    rows. A phrase that is not at `index` is taken where it occurs nearest (val idx 42 is off by
    one). One whose words are not contiguous ("Kamenev and Zinoviev", test idx 80-82) gives its
    first word that occurs within ten words of `index`. None if no word of it occurs there.
    """
    words = [(match.group(), match.start()) for match in re.finditer(r"\S+", text)]
    plain = [_plain(word) for word, _ in words]
    wanted = [_plain(word) for word in phrase.split()]
    for size in (len(wanted), 1):
        places = [
            (abs(i - index), i, wanted[skip : skip + size])
            for skip in range(len(wanted) - size + 1)
            for i in range(len(words) - size + 1)
            if all(map(_same, plain[i : i + size], wanted[skip : skip + size]))
            and (size > 1 or len(wanted) == 1 or abs(i - index) <= 10)]
        if places:
            _, first, part = min(places, key=lambda place: place[0])
            return _trimmed(words[first : first + size], part)
    return None


def _plain(word: str) -> str:
    return re.sub(r"\W|_", "", word).lower()


def _same(word: str, wanted: str) -> bool:
    return bool(wanted) and (word == wanted or word in (wanted + "s", wanted + "ll", wanted + "d"))


def _trimmed(words: list[tuple[str, int]], part: list[str]) -> tuple[int, int]:
    """Return the span of `words` without the punctuation (and "'s") around the phrase."""
    first, start = words[0]
    last, last_start = words[-1]
    start += len(first) - len(first.lstrip("\"'`([.,;:!?-"))
    kept = len(last) if _plain(last) == part[-1] else last.rfind("'")
    end = last_start + len(last[: kept if kept > 0 else len(last)].rstrip("\"'`)].,;:!?-"))
    return start, max(end, start + 1)


_PARSERS: dict[str, Callable[[Line], list[Example]]] = {
    parser.__name__.removeprefix("_"): parser for parser in
    (_texts, _choices, _tags, _answers, _copa, _multirc, _record, _wic, _wsc)}
