"""Every metric against its reference on random inputs and on those that break formulas."""

import random
import string
import unicodedata
import warnings
from collections import Counter

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics

from deberta_ds.finetuning import metrics
from deberta_ds.finetuning.answer_texts import language_of, normalize, token_f1
from deberta_ds.finetuning.layouts import Example
from deberta_ds.finetuning.tasks import Task, task_named

pytestmark = pytest.mark.filterwarnings("ignore::Warning:sklearn", "ignore::Warning:scipy",
                                        "ignore::Warning:seqeval")


def task_of(*names: str, head: str = "classify", labels=()) -> Task:
    return Task(name="mine", head=head, texts=("a",), labels=tuple(labels), metrics=names)


def labelled(gold) -> list[Example]:
    return [Example((n,), (("a",),), label) for n, label in enumerate(gold)]


def some_classes(dice: random.Random) -> tuple[int, list[int], list[int]]:
    """Return (number of labels, gold, predictions): absent classes, one class, one example."""
    size, count = dice.randint(2, 6), dice.choice((1, 2, 5, 40))
    seen = dice.sample(range(size), dice.randint(1, size))
    guessed = seen if dice.random() < 0.5 else dice.sample(range(size), dice.randint(1, size))
    gold = [dice.choice(seen) for _ in range(count)]
    return size, gold, [label if dice.random() < 0.4 else dice.choice(guessed) for label in gold]


def test_classes_are_scored_as_by_scikit_learn():
    names = ("accuracy", "macro_f1", "matthews_multi")
    for seed in range(100):
        size, gold, guess = some_classes(random.Random(seed))
        task = task_of(*names, labels=string.ascii_letters[:size])
        found = metrics.score(task, labelled(gold), guess)
        wanted = (sklearn_metrics.accuracy_score(gold, guess),
                  sklearn_metrics.f1_score(gold, guess, average="macro", zero_division=0),
                  sklearn_metrics.matthews_corrcoef(gold, guess))
        assert list(found.values()) == pytest.approx(wanted, abs=1e-12), (gold, guess)
        fixed = metrics.score(task_named("CB"), labelled(np.array(gold) % 3), np.array(guess) % 3)
        assert fixed["macro_f1"] == pytest.approx(sklearn_metrics.f1_score(
            np.array(gold) % 3, np.array(guess) % 3, labels=[0, 1, 2], average="macro",
            zero_division=0))
        two = metrics.score(task_of("binary_f1", labels="ab"), labelled(np.array(gold) % 2),
                            np.array(guess) % 2)
        assert two["binary_f1"] == pytest.approx(sklearn_metrics.f1_score(
            np.array(gold) % 2, np.array(guess) % 2, zero_division=0))
        rows = metrics.class_counts(task, labelled(gold), guess)
        assert [gold for _, gold, _ in rows.values()] == [gold.count(n) for n in range(size)]
        assert metrics.confusion(task, labelled(gold), guess) == (
            sklearn_metrics.confusion_matrix(gold, guess, labels=range(size)).tolist())


def test_classes_that_occur_nowhere_do_not_count():
    """Five labels in train, three in validation, all right: macro F1 was 60.0."""
    task = task_of("macro_f1", labels="abcde")
    assert metrics.score(task, labelled([0, 2, 4]), [0, 2, 4]) == {"macro_f1": 1.0}
    found = metrics.score(task_named("CB"), labelled([0, 2]), [0, 2])
    assert found["macro_f1"] == pytest.approx(2 / 3)  # CB's official rule: all three


@pytest.mark.parametrize("seed", range(20))
def test_several_labels_are_scored_as_by_scikit_learn(seed):
    dice = np.random.default_rng(seed)
    many, guesses = dice.integers(0, 2, (2, dice.integers(1, 30), 4)) * dice.integers(0, 2, 4)
    task = task_of("micro_f1", "macro_f1", "exact_labels", head="multilabel", labels="abcd")
    examples, predictions = labelled(map(tuple, many)), [tuple(row) for row in guesses]
    found = metrics.score(task, examples, predictions)
    for average in ("micro", "macro"):
        wanted = sklearn_metrics.f1_score(many, guesses, average=average, zero_division=0)
        assert found[f"{average}_f1"] == pytest.approx(wanted)
    assert found["exact_labels"] == sklearn_metrics.accuracy_score(many, guesses)
    hits, gold, guess = zip(*metrics.class_counts(task, examples, predictions).values(),
                            strict=True)
    wanted = sklearn_metrics.multilabel_confusion_matrix(many, guesses)
    assert list(hits) == wanted[:, 1, 1].tolist() and list(gold) == many.sum(0).tolist()
    assert list(guess) == guesses.sum(0).tolist()


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e6, 1e200])
def test_numbers_correlate_as_by_scipy(scale):
    """Labels of 1e-7 correlated with nothing, as their squares fell below a limit."""
    for seed in range(20):
        dice = np.random.default_rng(seed)
        count = int(dice.choice([2, 3, 30]))
        gold, guess = dice.integers(0, 20, count) / 4 * scale, dice.normal(size=count).round(1)
        found = metrics.score(task_of("pearson", "spearman", head="regress"), labelled(gold), guess)
        ties = len({*gold}) == 1 or len({*guess}) == 1
        wanted = stats.pearsonr(gold / scale, guess)[0], stats.spearmanr(gold, guess)[0]
        assert list(found.values()) == ([0, 0] if ties else pytest.approx(wanted, abs=1e-12))


@pytest.mark.parametrize("guess", [[3.0] * 3, [0.1] * 3, [1e300] * 3, [np.nan, 1.0, 2.0],
                                   [np.inf, 1.0, 2.0]])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_constants_and_what_is_no_number_correlate_with_nothing(guess):
    task = task_of("pearson", head="regress")
    assert metrics.score(task, labelled([1.0, 2.0, 4.0]), guess) == {"pearson": 0.0}
    assert metrics.score(task, labelled([0.1] * 3), [1.0, 2.0, 4.0]) == {"pearson": 0.0}


def conlleval(tags: list[str]) -> list[tuple[str, int, int]]:
    """Return the chunks of the perl script: one that ends where it must, and starts where it may
    (startOfChunk, endOfChunk), with what stands before a sentence being O."""
    chunks, before, kind_before, start = [], "O", "", 0
    for place, tag in enumerate([*tags, "O"]):
        now, _, kind = tag.partition("-")
        inside = before != "O" and now in ("I", "E") and before not in ("O", "E")
        if before != "O" and (not inside or kind != kind_before):
            chunks.append((kind_before, start, place))
        if now != "O" and (not inside or kind != kind_before):
            start = place
        before, kind_before = now, kind
    return chunks


def tag_cases(count: int):
    """Yield (scheme, gold, predictions): any order of tags, so most are against their scheme."""
    for seed in range(count):
        dice = random.Random(seed)
        scheme = dice.choice(("BIO", "IO", "BIOES", "BIOLU"))
        kinds = dice.choice(([""], ["X", "Y"], ["X", "X-Y"], ["", "X"]))
        tags = sorted({letter if letter == "O" or not kind else f"{letter}-{kind}"
                       for letter in scheme for kind in kinds})
        gold = [[dice.choice(tags) for _ in range(dice.randint(1, 9))] for _ in range(3)]
        yield scheme, tags, gold, [[tag if dice.random() < 0.6 else dice.choice(tags)
                                    for tag in row] for row in gold]


def test_spans_are_scored_as_by_seqeval_and_conlleval():
    """Tags without a kind were kinds of their own: gold B I I, predicted I I I was 0, not 1."""
    seqeval = pytest.importorskip("seqeval.metrics")
    for scheme, tags, gold, guess in tag_cases(400):
        task = task_of("span_f1", "tag_accuracy", head="tags", labels=tags)
        examples = labelled(tuple(map(tags.index, row)) for row in gold)
        predictions = [tuple(map(tags.index, row)) for row in guess]
        found = metrics.score(task, examples, predictions)
        if scheme in ("BIO", "IO"):
            assert [metrics.spans_of(row) for row in gold] == list(map(conlleval, gold))
        # seqeval's default mode takes U and L for nothing: the same tags in the letters of IOBES.
        letters = str.maketrans("LU", "ES")
        renamed = [[[tag[0].translate(letters) + tag[1:] for tag in row] for row in side]
                   for side in (gold, guess)]
        assert found["span_f1"] == pytest.approx(seqeval.f1_score(*renamed)), (gold, guess)
        assert found["tag_accuracy"] == pytest.approx(seqeval.accuracy_score(gold, guess))
        report = seqeval.classification_report(*renamed, output_dict=True, zero_division=0)
        for kind, (hits, right, guessed) in metrics.class_counts(
                task, examples, predictions).items():
            wanted = report["_" if kind == "(no kind)" else kind]
            assert right == wanted["support"]
            assert hits / max(right, 1) == pytest.approx(wanted["recall"])
            assert hits / max(guessed, 1) == pytest.approx(wanted["precision"])


def test_bilou_and_iobes_that_follow_their_scheme_are_seqevals_strict_ones():
    seqeval = pytest.importorskip("seqeval.metrics")
    schemes = pytest.importorskip("seqeval.scheme")
    for seed in range(60):
        dice = random.Random(seed)
        single, last = dice.choice(("SE", "UL"))
        sides = []
        for _ in range(2):
            row: list[str] = []
            while len(row) < 9:
                kind, length = dice.choice("XY"), dice.randint(0, 3)
                row += {0: ["O"], 1: [f"{single}-{kind}"]}.get(
                    length, [f"B-{kind}", *[f"I-{kind}"] * (length - 2), f"{last}-{kind}"])
            sides.append(row)
        length = min(map(len, sides))
        gold, guess = ([*row, *["O"] * (12 - len(row))] for row in sides)
        labels = sorted({*gold, *guess})
        found = metrics.score(
            task_of("span_f1", head="tags", labels=labels),
            labelled([tuple(map(labels.index, gold))]), [tuple(map(labels.index, guess))])
        scheme = schemes.IOBES if single == "S" else schemes.BILOU
        assert length and found["span_f1"] == pytest.approx(
            seqeval.f1_score([gold], [guess], mode="strict", scheme=scheme))


ARTICLES = {"en": "a an the", "es": "un una unos unas el la los las",
            "vi": "của là cái chiếc những",
            "de": "ein eine einen einem eines einer der die das den dem des", "hi": "", "zh": ""}


def mlqa_words(text: str, language: str) -> list[str]:
    """Return the words that MLQA's evaluation compares, as its paper and script describe them."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation
                   and unicodedata.category(letter)[0] != "P")
    if language == "zh":
        text = "".join(f" {x} " if "\u4e00" <= x <= "\u9fa5" else x for x in text)
    if language == "ar":  # an article is taken out of every word
        text = text.replace("ال", " ")
    return [word for word in text.split() if word not in ARTICLES.get(language, "").split()]


@pytest.mark.parametrize("language", ["en", "es", "hi", "vi", "de", "ar", "zh"])
def test_answers_are_compared_by_mlqas_rules(language):
    parts = [*ARTICLES.get(language, "").split(), "北京", "大學", "2008年", "Straße", "«x»", "「日",
             "،", "البيت", "مال", "हिन्दी", "một", "(U.S.)", "–", "'s", " ", "\u3000", "…", "$5"]
    for seed in range(100):
        dice = random.Random(seed)
        between = "" if language == "zh" and seed % 2 else " "
        first, second = (between.join(dice.choices(parts, k=dice.randint(0, 5)))
                         for _ in range(2))
        one, two = mlqa_words(first, language), mlqa_words(second, language)
        assert normalize(first, language) == " ".join(one)
        same = sum((Counter(one) & Counter(two)).values())
        wanted = 2 * same / (len(one) + len(two)) if same else 0.0
        assert token_f1(normalize(first, language), normalize(second, language)) == wanted


@pytest.mark.parametrize(("text", "gold", "guess", "f1"), [
    ("1600年に関ヶ原の戦いが起きた。", "関ヶ原の戦い", "関ヶ原", 2 * 3 / 9),
    ("กรุงเทพเป็นเมืองหลวง", "กรุงเทพ", "กรุง", 2 * 4 / 11),
    ("北京大学在北京。", "北京大学。", "北京大学", 1.0),
    ("The Yuan dynasty (元朝) fell in 1368.", "Yuan dynasty (元朝)", "the Yuan dynasty", 0.8),
])
def test_answers_in_scripts_without_spaces_are_compared_by_characters(text, gold, guess, f1):
    """White space made one word of a Japanese answer: F1 was exact match."""
    example = Example((0,), (("q", text),), (), gold=(gold,), language=language_of(text))
    found = metrics.score(task_named("SQuAD-v1.1"), [example], [guess])
    assert found["f1"] == pytest.approx(f1)


def test_nothing_warns_on_one_class_one_example_and_no_span():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("accuracy", "macro_f1", "matthews_multi", "binary_f1"):
            metrics.score(task_of(name, labels="ab"), labelled([0]), [0])
        tags = task_of("span_f1", head="tags", labels=("O", "B"))
        assert metrics.score(tags, labelled([(0, 0)]), [(0, 0)]) == {"span_f1": 0.0}
