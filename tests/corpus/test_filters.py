"""Filters: the published rules against their formulas, personal data, languages, own functions."""

import json
import random
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from data_helpers import (
    READ,
    SENTENCES,
    planned,
    random_documents,
    stored_texts,
    tiny_tokenizer,
    tokenize,
    tree,
)

from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError
from deberta_ds.base.files import read_json
from deberta_ds.corpus import quality
from deberta_ds.corpus.documents import Document
from deberta_ds.corpus.filter_rules import FilterRules, LanguageRule, PersonalRule, read_rules
from deberta_ds.corpus.filters import Filters, report_lines, try_filters
from deberta_ds.corpus.quality import Runs, Text, find_personal, gopher, without_lines
from deberta_ds.data.shards import read_manifest
from deberta_ds.tokenizer.text import letter_share

FILTERS = Path(__file__).parents[2] / "data_prep/filters"
PROSE = ("It was the best of times that we have seen, and the worst of them came with a letter to "
         "be read by number {0} of the {1} people who lived there. ")
RULES = FilterRules(use=("c4",))
UNSPACED = ("、".join("老水手") + "，「" + "。".join("带着信回") + "」！") * 20


def prose(sentences=6, seed=0):
    generator = random.Random(seed)
    return "\n".join(PROSE.format(generator.randint(0, 10**6), generator.randint(0, 10**6))
                     for _ in range(sentences))


def judged(text, **rules):
    return Filters(FilterRules(**rules))(Document(text, "a.txt", 0, "text"))


@pytest.mark.parametrize(("rule", "text", "reason"), [
    ("gopher", prose(), ""),
    ("gopher", "Too short, that is all.", "few words"),
    ("gopher", "the of " + "a b c d " * 40, "short words"),
    ("gopher", "the of " + "internationalization " * 60, "long words"),
    ("gopher", prose() + " # # #" * 40, "hash signs"),
    ("gopher", prose() + " well ..." * 60, "ellipses"),
    ("gopher", "\n".join(f"- the word of number {i} and more" for i in range(40)), "bullets"),
    ("gopher", "\n".join(f"the word of number {i} and some more that goes on for longer …"
                         for i in range(40)), "lines end in ellipses"),
    ("gopher", prose() + " 123 456 789 ;" * 40, "few letters"),
    ("gopher", "Lorem ipsum dolor sit amet consectetur adipiscing elit sed tempor. " * 9,
     "few stop words"),
    ("gopher", "中文没有空格，所以每个词片都是一个词。" * 9, ""),  # no mean length, no stop words
    ("gopher", UNSPACED, ""), ("gopher", UNSPACED + " ★ 12" * 90, "few letters"),
    ("repetition", prose(40), "repeated runs of 5 words"),  # the same sentence with other numbers
    ("repetition", "One line.\nAnd another.\n" * 9, "repeated lines"),
    ("repetition", " ".join(SENTENCES), ""), ("repetition", "\r\n\r\n".join(SENTENCES), ""),
    ("c4", prose(), ""), ("c4", prose(2), "few sentences"), ("c4", prose() + "if (x) { y }", "'{'"),
    ("c4", "一句话。" * 5, ""),
    ("fineweb", prose(), ""), ("fineweb", "\r\n\r\n".join(SENTENCES), ""),
    ("fineweb", "Home\nAbout\nContact\n", "few lines end in a mark"),
    ("fineweb", "Yes.\nNo.\nWell.\n" + prose(1), "short lines"),
    ("fineweb", prose() + "\n" + prose(), "repeated lines")])
def test_rules_of_documents(rule, text, reason):
    assert getattr(quality, rule)(Text(text), getattr(RULES, rule)) == reason


HINDI = ("यह एक छोटा सा गाँव है जहाँ लोग खेती करते हैं और शाम को मिलकर गीत गाते हैं। बच्चे नदी के किनारे खेलते हैं, "
         "और बूढ़े लोग पेड़ के नीचे बैठकर पुरानी कहानियाँ सुनाते हैं। ")


@pytest.mark.parametrize("text", [HINDI, unicodedata.normalize("NFD", HINDI + "Café déjà vu")])
def test_words_with_vowel_signs_are_words(text):
    """They were counted consonant by consonant, and all Hindi went for its short words."""
    parts = text.replace("।", "").replace(",", "").split()
    assert Text(text).words == parts and not Text(text).is_unspaced
    assert gopher(Text(text * 3), replace(RULES.gopher, min_stop_words=0)) == ""
    assert letter_share(text) > 0.9


def test_repetition_without_spaces_is_that_of_words():
    """Five letters in a row, some two words, are everywhere in Chinese and Japanese: most went."""
    generator = random.Random(2)
    numbers = generator.choices(range(900), [1 / (n + 1) for n in range(900)], k=1500)
    for order, reason in ((numbers, ""), (numbers[:400] * 2 + numbers[400:900], "repeated runs")):
        spaced = "".join(f"{chr(97 + n // 30)}{chr(97 + n % 30)}{'. ' if i % 10 == 9 else ' '}"
                         for i, n in enumerate(order))
        unspaced = "".join(f"{chr(0x4E00 + n // 30)}{chr(0x5E00 + n % 30)}{'。' * (i % 10 == 9)}"
                           for i, n in enumerate(order))
        for text in (spaced, unspaced):
            found = quality.repetition(Text(text), RULES.repetition)
            assert found.startswith(reason) and bool(found) == bool(reason)


def naive_repetition(words, count):
    """Characters of the most frequent run, and of repeated ones, as in the paper's appendix."""
    runs = [tuple(words[i:i + count]) for i in range(len(words) - count + 1)]
    if not runs:
        return 0, 0
    run, times = Counter(runs).most_common(1)[0]
    seen, place, repeated = set(), 0, 0
    while place < len(runs):
        if runs[place] in seen:
            repeated += sum(map(len, runs[place]))
            place += count
        else:
            seen.add(runs[place])
            place += 1
    return (times > 1) * times * (sum(map(len, run)) + count - 1), repeated


def test_repetition_is_that_of_a_loop():
    generator = random.Random(1)
    for words in range(0, 60, 3):
        text = generator.choices(["a", "bb", "ccc", "dddd"], k=words)
        runs = Runs(text)
        for count in (2, 3, 4, 5, 6, 7, 8, 9, 10):
            top, repeated = naive_repetition(text, count)
            assert runs.top_characters(count) == top
            assert runs.repeated_characters(count, 0) == repeated


def test_lines_that_are_no_text_are_taken_out():
    text = "Menu\nThis page uses cookies to work.\nA line of text.[1]\n\nAnd one more of it!"
    left, gone = without_lines(text, RULES.lines)
    assert left == "A line of text.\n\nAnd one more of it!"
    assert gone == {"no end mark": 1, "uses cookies": 1}
    assert judged("Menu\nHome", use=("lines",)).reason == "lines: none left"
    assert judged(text, use=("lines",)).changes == {"line: no end mark": 1,
                                                    "line: uses cookies": 1}


@pytest.mark.parametrize(("text", "kind"), [
    ("write to anna.b+c@mail.example-site.co.uk.", "email"), ("from 8.8.8.8:80", "ip"),
    ("call +49 (30) 901820 now", "phone"), ("card 4111 1111 1111 1111.", "card"),
    ("to DE89 3704 0044 0532 0130 00 IN full", "iban"), ("連絡はfoo@corp.jpまで。", "email"),
    ("電話は+81 3 4111 2222へ", "phone"), ("サーバ93.184.216.34です", "ip"),
    ("番号4111 1111 1111 1111です", "card"), ("口座DE89 3704 0044 0532 0130 00です", "iban"),
    ("อีเมลfoo@corp.co.thครับ", "email")])
def test_personal_data_is_masked_once_and_for_all(text, kind):
    masked, found = find_personal(text, RULES.personal.kinds)
    assert found == {kind: 1} and masked != text
    assert masked[-1] == text[-1] and (text[0] == "w" or masked[0] == text[0])
    assert find_personal(masked, RULES.personal.kinds) == (masked, {})
    assert judged(text, use=("personal",), personal=PersonalRule(action="drop")
                  ).reason == f"personal: {kind}"


@pytest.mark.parametrize("text", ["at 3@2 or a @name", "version 10.2.3.4 and 192.168.0.1",
                                  "4111 1111 1111 1112", "1+2 = 3", "DE00 3704 0044 0532 0130 00",
                                  "0000 0000 0000 0000", "ISBN 978-3-16-148410-0 of 1917-2003"])
def test_what_only_looks_like_personal_data_stays(text):
    assert find_personal(text, RULES.personal.kinds) == (text, {})


def test_languages():
    pytest.importorskip("py3langid")
    rules = {"use": ("language",), "language": LanguageRule(keep=("en", "de"), label=True)}
    german = "Der schnelle braune Fuchs springt über den faulen Hund und läuft in den Wald."
    assert judged(german, **rules)[1:] == ("", {}, "de")
    assert judged("Быстрая коричневая лиса прыгает через ленивую собаку.", **rules).reason == (
        "language: ru")


PRESETS = dict(line.split(maxsplit=1) for line in (  # own sentences, of 50 words and more
    Path(__file__).parents[1] / "fixtures/languages.txt").read_text().splitlines())


@pytest.mark.parametrize("code", PRESETS)
def test_a_preset_keeps_its_language_and_another_one_is_named(tmp_path, code):
    pytest.importorskip("py3langid")
    rules = read_rules(FILTERS / f"web_{code}.toml")
    text = PRESETS[code].replace(". ", ".\n").replace("。", "。\n")
    verdict = Filters(rules)(Document(text, "a", 0, "json"))
    assert verdict.reason in ("", "c4: few sentences"), verdict
    units = planned(tmp_path / "a.jsonl", [text])
    other = read_rules(FILTERS / f"web_{'en' if code != 'en' else 'ru'}.toml")
    summary = try_filters(units, tmp_path / "out", other, read=READ)["summary"]
    assert summary.endswith(f"({code}): use --filters data_prep/filters/web_{code}.toml")


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(
        "def no_foxes(text):\n    return None if 'fox' in text else text.replace('dog', 'cat')\n"
        "def broken(text):\n    return text[10**9]\n")
    (tmp_path / "own.toml").write_text('use = ["personal"]\nfunctions = ["own.py:no_foxes"]\n')
    return tmp_path / "own.toml"


def test_filters_file_with_a_function_of_ones_own(own, tmp_path):
    rules, source = read_rules(own), tmp_path / "text.jsonl"
    assert Filters(rules)(Document("a fox", "a", 0, "json")).reason == "function: no_foxes"
    assert Filters(rules)(Document("a dog", "a", 0, "json")).text == "a cat"
    for text, message in (('functions = ["no.py:f"]', "no such file"), ('use = ["gofer"]', "use"),
                          ('use = ["c4"]\n[c4]\nmin_sentence = 3', "did you mean")):
        own.write_text(text)
        with pytest.raises(UserError, match=message):
            read_rules(own)
    source.write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match="text.jsonl:1: broken .*IndexError.*line 4"):
        Filters(replace(rules, functions=(f"{tmp_path}/own.py:broken",)))(
            Document("x", str(source), 0, "json"))


def test_a_corpus_lacks_what_the_filters_drop_with_any_number_of_workers(own, tmp_path):
    texts = random_documents(200, longest=3) + [f"mail me at a{i}@b.org" for i in range(9)]
    source = tmp_path / "text.jsonl"
    units, rules = planned(source, texts, 5000), read_rules(own)
    for workers in (1, 2):
        tokenize(units, tmp_path / str(workers), workers, filters=rules)
    assert tree(tmp_path / "1") == tree(tmp_path / "2")
    stored = stored_texts(tmp_path / "1")
    dropped = sum("fox" in text for text in texts)
    assert not any("fox" in text or "dog" in text for text in stored) and dropped > 20
    assert stored.count("mail me at name@example.com") == 9
    assert read_manifest(tmp_path / "1")[0].counts["filtered"] == dropped
    report = json.loads((tmp_path / "1" / "filters.json").read_text())
    assert report["dropped"]["function: no_foxes"][0] == dropped
    assert report["changed"]["masked: email"] == [9, 9]
    examples = report["examples"]["function: no_foxes"]
    assert len(examples) == 20 and all(text in texts for _, text in examples)
    tried = try_filters(units, tmp_path / "try", rules, read=READ, tokenizer=tiny_tokenizer())
    assert {**tried, "rules": 0} == {**report, "rules": 0}
    page = "\n".join([*report_lines(tried), tried["summary"]])
    assert "function: no_foxes" in page and str(source) in page
    assert "9 documents changed, 9 times  masked: email" in page
    tokens = [sum(map(len, map(tiny_tokenizer().encode, found))) for found in (
        [text for text in texts if "fox" in text], texts)]
    assert f"{tokens[0]:,} of {tokens[1]:,} tokens ({tokens[0] / tokens[1]:.1%})" in page
    (tmp_path / "own.py").write_text("def no_foxes(text):\n    return text\n")
    user_code.forget()  # as in another process
    with pytest.raises(UserError, match="other inputs or options"):
        tokenize(units, tmp_path / "1", filters=rules)


def test_half_a_character_among_the_examples_does_not_break_the_report(own, tmp_path):
    """The page refused the report, after the corpus was complete and at every run since."""
    units = planned(tmp_path / "text.jsonl", ["a fox \ud800 of \U0001f98a", "a text"])
    rules = read_rules(own)
    tokenize(units, tmp_path / "out", filters=rules)
    try_filters(units, tmp_path / "try", rules, read=READ)
    for name in ("out", "try"):
        report = read_json(tmp_path / name / "filters.json")
        assert "a fox \\\\ud800 of \U0001f98a" in "".join(report_lines(report))
