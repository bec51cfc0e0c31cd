"""Every metric against its references on random inputs and on those that break formulas.

As a program it prints the table of docs/evidence/finetuning.md:
    PYTHONPATH=.:tests:tests/finetuning python tests/finetuning/test_metrics_references.py
"""

import random
import re
import string
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics

from deberta_ds.tasks import metrics
from deberta_ds.tasks.answer_texts import language_of
from deberta_ds.tasks.layouts import Example
from deberta_ds.tasks.task import Task, task_named

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
Compared = Iterator[tuple[str, str, float, float]]  # metric, reference, ours, theirs


def task_of(*names: str, head: str = "classify", labels=()) -> Task:
    return Task(name="mine", head=head, texts=("a",), labels=tuple(labels), metrics=names)


def labeled(gold) -> list[Example]:
    return [Example((n,), (("a",),), label) for n, label in enumerate(gold)]


def some_classes(dice: random.Random) -> tuple[int, list[int], list[int]]:
    """Return (number of labels, gold, predictions): absent classes, one class, one example."""
    size, count = dice.randint(2, 6), dice.choice((1, 2, 5, 40))
    seen = dice.sample(range(size), dice.randint(1, size))
    guessed = seen if dice.random() < 0.5 else dice.sample(range(size), dice.randint(1, size))
    gold = [dice.choice(seen) for _ in range(count)]
    return size, gold, [label if dice.random() < 0.4 else dice.choice(guessed) for label in gold]


def classes(dice: random.Random) -> Compared:
    size, gold, guess = some_classes(dice)
    task = task_of("accuracy", "macro_f1", "matthews_multi", labels=string.ascii_letters[:size])
    found = metrics.score(task, labeled(gold), guess)
    for name, wanted in (
            ("accuracy", sklearn_metrics.accuracy_score(gold, guess)),
            ("macro_f1", sklearn_metrics.f1_score(gold, guess, average="macro", zero_division=0)),
            ("matthews_multi", sklearn_metrics.matthews_corrcoef(gold, guess))):
        yield name, "scikit-learn", found[name], wanted
    counts = metrics.class_counts(task, labeled(gold), guess)
    assert [right for _, right, _ in counts.values()] == [gold.count(n) for n in range(size)]
    assert metrics.confusion(task, labeled(gold), guess) == (
        sklearn_metrics.confusion_matrix(gold, guess, labels=range(size)).tolist())
    gold, guess = np.array(gold) % 2, np.array(guess) % 2
    for name, wanted in (("binary_f1", sklearn_metrics.f1_score(gold, guess, zero_division=0)),
                         ("matthews", sklearn_metrics.matthews_corrcoef(gold, guess))):
        task = task_of(name, labels="ab")
        yield name, "scikit-learn", metrics.score(task, labeled(gold), guess)[name], wanted


def several_labels(dice: random.Random) -> Compared:
    numbers = np.random.default_rng(dice.randrange(1 << 30))
    gold, guess = numbers.integers(0, 2, (2, numbers.integers(1, 30), 4)) * numbers.integers(0, 2,
                                                                                             4)
    task = task_of("micro_f1", "macro_f1", "exact_labels", head="multilabel", labels="abcd")
    examples, predictions = labeled(map(tuple, gold)), [tuple(row) for row in guess]
    found = metrics.score(task, examples, predictions)
    for average in ("micro", "macro"):
        yield f"{average}_f1 (several labels)", "scikit-learn", found[f"{average}_f1"], (
            sklearn_metrics.f1_score(gold, guess, average=average, zero_division=0))
    yield "exact_labels", "scikit-learn", found["exact_labels"], (
        sklearn_metrics.accuracy_score(gold, guess))
    counts = np.array([*metrics.class_counts(task, examples, predictions).values()])
    wanted = sklearn_metrics.multilabel_confusion_matrix(gold, guess)
    assert (counts == np.stack([wanted[:, 1, 1], gold.sum(0), guess.sum(0)], 1)).all()


def numbers(dice: random.Random) -> Compared:
    """Labels of 1e-7 correlated with nothing, as their squares fell below a limit."""
    made = np.random.default_rng(dice.randrange(1 << 30))
    scale, count = dice.choice([1e-9, 1e-3, 1.0, 1e6, 1e200]), dice.choice([2, 3, 30])
    gold, guess = made.integers(0, 20, count) / 4, made.normal(size=count).round(1)
    found = metrics.score(task_of("pearson", "spearman", head="regress"), labeled(gold * scale),
                          guess)
    is_constant = len({*gold}) == 1 or len({*guess}) == 1
    for name, wanted in (("pearson", stats.pearsonr(gold, guess)[0]),
                         ("spearman", stats.spearmanr(gold, guess)[0])):
        yield name, "scipy", found[name], 0.0 if is_constant else wanted


def superglue(dice: random.Random) -> Compared:
    """The rules of the official code: CB's and AX-g's of jiant, MultiRC's multirc_measures.py, the
    evaluation script of ReCoRD."""
    gold, guess = ([dice.choice((0, 1, 2, 2)[dice.randrange(4):]) for _ in range(9)] for _ in "ab")
    found = metrics.score(task_named("CB"), labeled(gold), guess)
    yield "macro_f1 (CB)", "jiant", found["macro_f1"], sklearn_metrics.f1_score(
        gold, guess, labels=range(3), average="macro", zero_division=0)  # all three, also absent
    yield "accuracy (CB)", "jiant", found["accuracy"], sum(map(int.__eq__, gold, guess)) / 9

    shares = [dice.choice((0, 0.3, 1)) for _ in "ab"]
    keys = [(p, q, a) for p in range(2) for q in range(3) for a in range(dice.randint(1, 4))]
    dice.shuffle(keys)
    gold, guess = ([int(dice.random() < share) for _ in keys] for share in shares)
    found = metrics.score(task_named("MultiRC"), [
        Example(key, (("t", "q"),), label) for key, label in zip(keys, gold, strict=True)], guess)
    if any(gold + guess):  # of nothing at all the script says 1, jiant and the Hub's metric 0
        yield "f1a (MultiRC)", "multirc_measures.py", found["f1a"], sklearn_metrics.f1_score(
            gold, guess)
    rows = list(zip(keys, gold, guess, strict=True))
    wrong = {key[:2] for key, label, answer in rows if label != answer}
    yield "em (MultiRC)", "multirc_measures.py", found["em"], (
        1 - len(wrong) / len({key[:2] for key in keys}))

    examples, guesses = some_answers(dice, TEXTS["en"])
    examples = [replace(e, names=("x",)) for e in examples]
    found = metrics.score(task_named("ReCoRD"), examples, guesses)
    f1, em = squad_scores(examples, guesses, squad_words)
    yield "f1 (ReCoRD)", "record_evaluation.py", found["f1"], f1
    yield "em (ReCoRD)", "record_evaluation.py", found["em"], em

    guess = [dice.randrange(2) for _ in range(12)]
    pairs = [Example((n,), (("a", f"b{n // 2}"),), n % 2) for n in range(12)]
    found = metrics.score(task_named("AX-g"), pairs, guess)
    yield "gender_parity (AX-g)", "jiant", found["gender_parity"], (
        sum(guess[n] == guess[n + 1] for n in range(0, 12, 2)) / 6)


def conlleval(gold: list[str], guess: list[str]) -> tuple[float, float]:
    """Return (F1, accuracy) by the counting loop of the perl script; sentences are parted by O."""
    ends = {"BB", "BO", "IB", "IO", "EE", "EI", "EO"}
    starts = {"BB", "IB", "OB", "OI", "OE", "EE", "EI"}
    hits = right = guessed = same = 0
    before, is_correct = [("O", ""), ("O", "")], False
    for pair in zip([*gold, "O"], [*guess, "O"], strict=True):
        now = [(tag.partition("-")[0], tag.partition("-")[2]) for tag in pair]
        ended, begun = [], []
        for (last, last_kind), (tag, kind) in zip(before, now, strict=True):
            ended.append(last + tag in ends or (last != "O" and last_kind != kind))
            begun.append(last + tag in starts or (tag != "O" and last_kind != kind))
        if is_correct:
            if all(ended) and before[0][1] == before[1][1]:
                hits, is_correct = hits + 1, False
            elif ended[0] != ended[1] or now[0][1] != now[1][1]:
                is_correct = False
        is_correct = is_correct or (all(begun) and now[0][1] == now[1][1])
        right, guessed, same = right + begun[0], guessed + begun[1], same + (now[0] == now[1])
        before = now
    precision, recall = hits / max(guessed, 1), hits / max(right, 1)
    return (2 * precision * recall / (precision + recall) if hits else 0.0,
            (same - 1) / max(len(gold), 1))


def spans(dice: random.Random) -> Compared:
    """Any order of tags, so most are against their scheme. Tags without a kind were kinds of their
    own: gold B I I, predicted I I I was 0, not 1."""
    seqeval = pytest.importorskip("seqeval.metrics")
    scheme = dice.choice(("BIO", "IO", "BIOES", "BIOLU"))
    kinds = dice.choice(([""], ["X", "Y"], ["X", "X-Y"], ["", "X"]))
    tags = sorted({letter if letter == "O" or not kind else f"{letter}-{kind}"
                   for letter in scheme for kind in kinds})
    gold = [[dice.choice(tags) for _ in range(dice.randint(1, 9))] for _ in range(3)]
    empty = dice.random() < 0.1
    guess = [["O" if empty else tag if dice.random() < 0.6 else dice.choice(tags) for tag in row]
             for row in gold]
    task = task_of("span_f1", "tag_accuracy", head="tags", labels=tags)
    examples = labeled(tuple(map(tags.index, row)) for row in gold)
    predictions = [tuple(map(tags.index, row)) for row in guess]
    found = metrics.score(task, examples, predictions)
    if scheme in ("BIO", "IO"):
        whole = [[tag for row in side for tag in (*row, "O")] for side in (gold, guess)]
        yield "span_f1 (IOB1, IOB2)", "conlleval", found["span_f1"], conlleval(*whole)[0]
    # seqeval's default mode takes U and L for nothing: the same tags in the letters of IOBES.
    letters = str.maketrans("LU", "ES")
    renamed = [[[tag[0].translate(letters) + tag[1:] for tag in row] for row in side]
               for side in (gold, guess)]
    yield f"span_f1 ({scheme})", "seqeval", found["span_f1"], seqeval.f1_score(*renamed)
    yield "tag_accuracy", "seqeval", found["tag_accuracy"], seqeval.accuracy_score(gold, guess)
    report = seqeval.classification_report(*renamed, output_dict=True, zero_division=0)
    for kind, (hits, right, guessed) in metrics.class_counts(task, examples, predictions).items():
        wanted = report["_" if kind == "(no kind)" else kind]
        assert right == wanted["support"]
        assert hits / max(right, 1) == pytest.approx(wanted["recall"])
        assert hits / max(guessed, 1) == pytest.approx(wanted["precision"])


def spans_by_their_scheme(dice: random.Random) -> Compared:
    """BILOU and IOBES that follow their scheme: seqeval's strict mode, and conlleval's E."""
    seqeval = pytest.importorskip("seqeval.metrics")
    schemes = pytest.importorskip("seqeval.scheme")
    single, last = dice.choice(("SE", "UL"))
    sides = []
    for _ in range(2):
        row: list[str] = []
        while len(row) < 9:
            kind, length = dice.choice("XY"), dice.randint(0, 3)
            row += {0: ["O"], 1: [f"{single}-{kind}"]}.get(
                length, [f"B-{kind}", *[f"I-{kind}"] * (length - 2), f"{last}-{kind}"])
        sides.append([*row, *["O"] * (12 - len(row))])
    labels = sorted({tag for side in sides for tag in side})
    found = metrics.score(
        task_of("span_f1", head="tags", labels=labels),
        labeled([tuple(map(labels.index, sides[0]))]), [tuple(map(labels.index, sides[1]))])
    scheme = schemes.IOBES if single == "S" else schemes.BILOU
    yield f"span_f1 ({scheme.__name__})", "seqeval, strict", found["span_f1"], (
        seqeval.f1_score([sides[0]], [sides[1]], mode="strict", scheme=scheme))


ARTICLES = {"en": "a an the", "es": "un una unos unas el la los las",
            "vi": "của là cái chiếc những",
            "de": "ein eine einen einem eines einer der die das den dem des", "hi": "", "zh": "",
            "ar": ""}
TEXTS = {language: [*articles.split(), "北京", "大學", "2008年", "Straße", "«x»", "「日", "،",
                    "البيت", "مال", "हिन्दी", "một", "(U.S.)", "an-other", "–", "'s",
                    "\u3000", "…", "$5"]
         for language, articles in ARTICLES.items()}


def squad_words(text: str) -> list[str]:
    """Return what both scripts of SQuAD do: lower, no punctuation, articles to spaces, words."""
    text = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
    return re.compile(r"\b(a|an|the)\b", re.UNICODE).sub(" ", text).split()


def mlqa_words(text: str, language: str) -> list[str]:
    """Return the words that MLQA's evaluation compares, as its paper and script describe them."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation
                   and unicodedata.category(letter)[0] != "P")
    if language == "zh":
        text = "".join(f" {x} " if "\u4e00" <= x <= "\u9fa5" else x for x in text)
    if language == "ar":  # an article is taken out of every word
        text = text.replace("ال", " ")
    return [word for word in text.split() if word not in ARTICLES[language].split()]


def some_answers(dice: random.Random, parts: list[str], between: str = " ", least: int = 1
                 ) -> tuple[list[Example], list[str]]:
    """Return (examples with at least so many gold answers, predictions): empty ones, repetitions,
    other cases, articles alone."""
    examples, guesses = [], []
    for n in range(6):
        golds = tuple(between.join(dice.choices(parts, k=dice.randint(1, 5)))
                      for _ in range(dice.randint(least, 3)))
        gold = dice.choice(golds or ("",))
        guesses.append(dice.choice([gold, gold.upper() + "!", "The " + gold, gold[:3], "", "a",
                                    gold + between + gold,
                                    between.join(dice.choices(parts, k=dice.randint(0, 5)))]))
        examples.append(Example((n, 0), (("q", "c"),), (), gold=golds, id=str(n)))
    return examples, guesses


def squad_scores(examples: list[Example], guesses: list[str],
                 words: Callable[[str], list[str]], is_v2: bool = False) -> tuple[float, float]:
    """Return (F1, exact match) as the scripts are described: the best of the gold answers counts;
    v2.0 drops golds of which nothing is left, and compares empty token lists as equal or not."""
    exact = f1 = 0.0
    for example, guess in zip(examples, guesses, strict=True):
        golds = [words(gold) for gold in example.gold]
        golds = [gold for gold in golds if gold] or [[]] if is_v2 else golds
        found, best = words(guess), []
        for gold in golds:
            same = sum((Counter(found) & Counter(gold)).values())
            precision, recall = same / max(len(found), 1), same / max(len(gold), 1)
            best.append(2 * precision * recall / (precision + recall) if same else
                        float(is_v2 and found == gold == []))
        exact += found in golds
        f1 += max(best)
    return f1 / len(examples), exact / len(examples)


def answer_texts(dice: random.Random) -> Compared:
    for version, least in (("v1.1", 1), ("v2.0", 0)):
        examples, guesses = some_answers(dice, TEXTS["en"], least=least)
        found = metrics.score(task_named(f"SQuAD-{version}"), examples, guesses)
        for (name, ours), theirs in zip(found.items(), squad_scores(
                examples, guesses, squad_words, version == "v2.0"), strict=True):
            yield name, f"evaluate-{version}.py", ours, theirs
    for language in ARTICLES:
        between = "" if language == "zh" and dice.random() < 0.5 else " "
        examples, guesses = some_answers(dice, TEXTS[language], between)
        found = metrics.score(task_named("SQuAD-v1.1"), [
            replace(example, language=language) for example in examples], guesses)
        for (name, ours), theirs in zip(found.items(), squad_scores(
                examples, guesses, lambda text, of=language: mlqa_words(text, of)), strict=True):
            yield f"{name} (language)", "mlqa_evaluation_v1.py", ours, theirs


CASES = {classes: 200, several_labels: 100, numbers: 200, superglue: 200, spans: 400,
         spans_by_their_scheme: 100, answer_texts: 100}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_scores_are_those_of_the_reference(case):
    for seed in range(CASES[case] // 4):  # all of them for the table
        for metric, reference, found, wanted in case(random.Random(seed)):
            assert abs(found - float(wanted)) <= 1e-12, (metric, reference, seed)


@pytest.mark.parametrize("guess", [[3.0] * 3, [0.1] * 3, [1e300] * 3, [np.nan, 1.0, 2.0],
                                   [np.inf, 1.0, 2.0]])
def test_constants_and_what_is_no_number_correlate_with_nothing(guess):
    task = task_of("pearson", head="regress")
    assert metrics.score(task, labeled([1.0, 2.0, 4.0]), guess) == {"pearson": 0.0}
    for gold in ([0.1] * 3, [1.0, 1 + 2**-52, 1.0]):  # up to rounding
        assert metrics.score(task, labeled(gold), [1.0, 2.0, 4.0]) == {"pearson": 0.0}


KOREAN = "대한민국의 수도는 서울이다 (Seoul)"  # as KorQuAD's evaluate-v1.0.py, by hand


@pytest.mark.parametrize(("text", "gold", "guess", "f1", "em"), [
    ("1600年に関ヶ原の戦いが起きた。", "関ヶ原の戦い", "関ヶ原", 2 * 3 / 9, 0),
    ("กรุงเทพเป็นเมืองหลวง", "กรุงเทพ", "กรุง", 2 * 4 / 11, 0),
    ("北京大学在北京。", "北京大学。", "北京大学", 1.0, 1),
    (KOREAN, "'서울특별시'", "《서울특별시》에 (서)", 2 * 5 / 7 * 1 / (5 / 7 + 1), 0),
    (KOREAN, "서울 시", "서울시", 1.0, 0),  # exact match knows spaces
    ("It is an-other one.", "an-other one", "another one", 1.0, 1),  # punctuation goes first
    ("The Yuan dynasty (元朝) fell in 1368.", "Yuan dynasty (元朝)", "the Yuan dynasty", 0.8, 0),
])
def test_answers_in_scripts_without_spaces_are_compared_by_characters(text, gold, guess, f1, em):
    example = Example((0,), (("q", text),), (), gold=(gold,), language=language_of(text))
    found = metrics.score(task_named("SQuAD-v1.1"), [example], [guess])
    assert found == pytest.approx({"f1": f1, "em": em})


def test_nothing_warns_on_one_class_one_example_and_no_span():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("accuracy", "macro_f1", "matthews_multi", "binary_f1"):
            metrics.score(task_of(name, labels="ab"), labeled([0]), [0])
        tags = task_of("span_f1", head="tags", labels=("O", "B"))
        assert metrics.score(tags, labeled([(0, 0)]), [(0, 0)]) == {"span_f1": 0.0}


def print_table() -> None:
    warnings.simplefilter("ignore")
    counts: Counter[tuple[str, str]] = Counter()
    largest: Counter[tuple[str, str]] = Counter()
    for case, count in CASES.items():
        for seed in range(count):
            for metric, reference, found, wanted in case(random.Random(seed)):
                counts[metric, reference] += 1
                largest[metric, reference] = max(abs(found - float(wanted)),
                                                 largest[metric, reference])
    print("| metric | reference | random cases | largest difference |\n|---|---|---|---|")
    for (metric, reference), count in counts.items():
        print(f"| {metric} | {reference} | {count} | {largest[metric, reference]:.0e} |")


if __name__ == "__main__":
    print_table()
