"""Files with a word per line: the conventions of the corpora that people have."""

import runpy

import pytest
from data_helpers import run_main
from launching import ROOT
from test_finetune_own import opened

from deberta_ds.base.errors import UserError
from deberta_ds.tasks.tables import read_table

MULTICONER = """# id 5239d808-f300-46ea-aa3b-5093040213a3\tdomain=en
anna _ _ B-PER
# _ _ O
sings _ _ O

# id 2\tdomain=en
# _ _ O
1 _ _ O
"""
WNUT = ("# id 1\tdomain=en\n#flair\tB-product\nis\tO\n\n#rome\tO\n#1\tO\n\n"
        "# id 2\tdomain=en\nHi\tO\n")
GERMEVAL = """#\thttp://de.wikipedia.org/wiki/Manfred_Korfmann\t[2009-10-17]
1\tAufgrund\tO\tO
2\tseiner\tO\tO
3\tDFB\tB-ORG\tB-LOC

#\thttp://de.wikipedia.org/wiki/X\t[2009-10-17]
1\tBerlin\tB-LOC\tO
2\t#\tO\tO
"""
CONLLU = """# newdoc id = a
# sent_id = 1
# text = Vámonos al mar
1-2\tVámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tVamos\tir\tVERB\tV\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\tP\t_\t1\tobj\t_\t_
3-4\tal\t_\t_\t_\t_\t_\t_\t_\t_
3\ta\ta\tADP\tA\t_\t5\tcase\t_\t_
4\tel\tel\tDET\tD\t_\t5\tdet\t_\t_
4.1\tgran\tgrande\tADJ\tJ\t_\t_\t_\t_\t_
5\tmar\tmar\tNOUN\tN\t_\t1\tobl\t_\t_

# sent_id = 2
1\tHola\thola\tINTJ\tI\t_\t0\troot\t_\t_
"""
CONLL2012 = """#begin document (bc/cctv/00/cctv_0000); part 000
bc/cctv/00/cctv_0000   0   0      In   IN  (TOP(S(PP*   -    -   -   S#1   *   *   -
bc/cctv/00/cctv_0000   0   1     New  NNP  (NP*         -    -   -   S#1   (GPE*   *   -
bc/cctv/00/cctv_0000   0   2    York  NNP  *)           -    -   -   S#1   *)   *   (3)
bc/cctv/00/cctv_0000   0   3   today   RB  *            -    -   -   S#1   (DATE)   *   -
bc/cctv/00/cctv_0000   0   4       .    .  *))          -    -   -   S#1   *   *   -

#end document
"""
KLUE = """## klue-ner-v1_000000-nsmc\t<경찰:OG> 이 왔다
경\tB-OG
찰\tI-OG
 \tO
이\tO
 \tO
왔\tO
다\tO

"""
WIKIANN = "en:Rome\tB-LOC\nen:.\tO\n"
NO_CONLL2012 = "#begin document x\nAnna B-PER\nist O\n#end document\n"
FIELDS = "1\tBob\tSpaceAfter=No\n2\tR\tSpaceAfter=No|name=B-PER\n3\t.\tname=O\n"
_ROWS_OF = runpy.run_path(str(ROOT / "examples/convert_annotations.py"))["rows_of"]


def converted(path, key: str = "", **columns) -> list[dict]:
    return list(_ROWS_OF(str(path), columns, key=key))


CASES = {
    "MultiCoNER": ("train.conll", MULTICONER, {}, [
        (["anna", "#", "sings"], ["B-PER", "O", "O"]), (["#", "1"], ["O", "O"])]),
    "WNUT-17": ("train.conll", WNUT, {}, [
        (["#flair", "is"], ["B-product", "O"]), (["#rome", "#1"], ["O", "O"]), (["Hi"], ["O"])]),
    "GermEval": ("NER-de-train.tsv", GERMEVAL, {"word": 2, "tag": 3}, [
        (["Aufgrund", "seiner", "DFB"], ["O", "O", "B-ORG"]), (["Berlin", "#"], ["B-LOC", "O"])]),
    "GermEval, inner": ("NER-de-train.tsv", GERMEVAL, {"word": 2, "tag": -1}, [
        (["Aufgrund", "seiner", "DFB"], ["O", "O", "B-LOC"]), (["Berlin", "#"], ["O", "O"])]),
    "CoNLL-U": ("es.conllu", CONLLU, {}, [
        (["Vamos", "nos", "a", "el", "mar"], ["VERB", "PRON", "ADP", "DET", "NOUN"]),
        (["Hola"], ["INTJ"])]),
    "CoNLL-U, XPOS": ("es.conll", CONLLU, {"word": 2, "tag": 5}, [
        (["Vamos", "nos", "a", "el", "mar"], ["V", "P", "A", "D", "N"]), (["Hola"], ["I"])]),
    "CoNLL-2012": ("cctv_0000.conll", CONLL2012, {}, [
        (["In", "New", "York", "today", "."], ["O", "B-GPE", "I-GPE", "B-DATE", "O"])]),
    "CoNLL-2002": ("esp.train", "Melbourne NP B-LOC\n( Fpa O\n\n# Fz O\n", {}, [
        (["Melbourne", "("], ["B-LOC", "O"]), (["#"], ["O"])]),
    "Dutch": ("ned.train", "-DOCSTART- -DOCSTART- O\nDe Art O\n\nRob N B-PER\n", {}, [
        (["De"], ["O"]), (["Rob"], ["B-PER"])]),
    "KLUE": ("klue-ner-v1_train.tsv", KLUE, {"word": 1, "tag": 2}, [
        (list("경찰 이 왔다"), ["B-OG", "I-OG"] + ["O"] * 5)]),
    "MasakhaNER": ("train.txt", "Duka O\nla O\nTumelo B-PER\n\n", {}, [
        (["Duka", "la", "Tumelo"], ["O", "O", "B-PER"])]),
    "OntoNotes' columns": ("onto.ner", "Bush NNP B-NP B-PERSON\nsaid VBD O O\n", {"tag": -1}, [
        (["Bush", "said"], ["B-PERSON", "O"])]),
    "Twitter POS": ("oct27.conll", "#obama\t#\nwon\tV\n\n# note 3\tx\n#\tX\nand\t&\n", {}, [
        (["#obama", "won"], ["#", "V"]), (["and"], ["&"])]),
    "key and value": ("a.conll", "# sent_id = 1\na x y O\nb x y B-X\n", {}, [
        (["a", "b"], ["O", "B-X"])]),
    "no tags": ("new.conllu", CONLLU.replace("VERB", "_").replace("INTJ", "_"), {"word": 2}, None),
    "words alone": ("new.txt", "# text = Hi #you\nHi\n#you\n", {}, [(["Hi", "#you"], None)]),
    "GermEval without tags": ("new.tsv", "1\tIn\n2\tRom\n", {"word": 2, "tag": 3}, [
        (["In", "Rom"], None)]),
    "tabs at the end": ("a.conll", "a\tO\t\nb\tB-X\t\n", {}, [(["a", "b"], ["O", "B-X"])]),
    "a blank word": ("ko.txt", "나 O\n  O\n너 B-PS\n", {}, [(["나", " ", "너"],
                                                           ["O", "O", "B-PS"])]),
    "GUM": ("gum.tsv", "\nBos\tperson\n'\tO\n\nants\tanimal\nsleep\tO\n", {}, [
        (["Bos", "'"], ["person", "O"]), (["ants", "sleep"], ["animal", "O"])]),
    "WikiANN": ("train", "en:Rome\tB-LOC\nen::\tO\nen:a:b\tO\n\nen:He\tO\n", {}, [
        (["Rome", ":", "a:b"], ["B-LOC", "O", "O"]), (["He"], ["O"])]),
    "WikiANN as .tsv": ("train.tsv", WIKIANN, {}, [(["Rome", "."], ["B-LOC", "O"])]),
    "WikiANN as .txt": ("train.txt", WIKIANN, {}, [(["Rome", "."], ["B-LOC", "O"])]),
    "no CoNLL-2012": ("a.conll", NO_CONLL2012, {"word": 1, "tag": -1}, [
        (["Anna", "ist"], ["B-PER", "O"])]),
    "a field of a column": ("a.conllu", FIELDS, {"word": 2, "tag": 3, "key": "name"}, [
        (["Bob", "R", "."], ["O", "B-PER", "O"])]),
    "a field of the last column": ("a.conllu", FIELDS, {"key": "name"}, [
        (["Bob", "R", "."], ["O", "B-PER", "O"])]),
    "all fields": ("a.conllu", FIELDS, {"word": 2, "tag": 3, "key": "all"}, [
        (["Bob", "R", "."], ["SpaceAfter=No", "SpaceAfter=No|name=B-PER", "name=O"])]),
}


@pytest.mark.parametrize("name", CASES)
def test_words_and_tags_of_a_corpus_in_its_own_form(tmp_path, name):
    file, text, options, wanted = CASES[name]
    (tmp_path / file).write_text(text)
    found = [(row["tokens"], row.get("tags")) for row in converted(tmp_path / file, **options)]
    if wanted is None:
        assert [tokens for tokens, _ in found] == [["Vamos", "nos", "a", "el", "mar"], ["Hola"]]
    else:
        assert found == wanted


@pytest.mark.parametrize(("file", "text", "options", "said"), [
    ("train.conll", GERMEVAL, {}, r"column 1 counts the words .* --word 2 --tag 3"),
    ("train.conll", CONLLU, {}, r"column 1 counts the words .* --word 2 --tag 4"),
    ("train.txt", CONLL2012.partition("\n")[2], {}, "column 1 is the same in all lines of a sent"),
    ("train.conll", "B-X\ta\nO\tb\n", {}, r"column 1 has the tags; say --word 2 --tag 1"),
    ("a.conll", "#FORMAT=WebAnno TSV 3.3\n\n1-1\t0-1\tx\t_\n", {}, "WebAnno's TSV is not read"),
    ("train.conll", "a B-X\nb\n\nc O\n", {}, "train.conll:2: 'b' has 1 columns, most lines of"),
    ("train.conll", "a\tO\n\tO\n\nc\tO\n", {}, "train.conll:2: .* has no word in column 1"),
    ("pl.conllu", "#DOCSTART\n\n1\tUnia\tB-LOC\n2\tjest\tO\n", {},
     "has 3 columns, and CoNLL-U 10.*--word 2 --tag 3"),
    ("train", WIKIANN * 15 + "Oslo\tB-LOC\n", {}, "train:31: the lines before are WikiANN's"),
    ("a.conll", NO_CONLL2012, {}, "no word in column 4; name .*: --word 1 --tag -1"),
    ("a.conllu", FIELDS, {"word": 2, "tag": 3}, "--key SpaceAfter or name, or --key all"),
    ("a.conllu", FIELDS, {"key": "nam"}, "no tag has a field nam=")])
def test_a_file_of_other_columns_is_refused(tmp_path, file, text, options, said):
    (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=said):
        converted(tmp_path / file, **options)


@pytest.mark.parametrize(("file", "text"), [
    ("train.annotated", WNUT), ("train.conll", WNUT), ("train.txt", WNUT), ("train", WNUT),
    ("a.jsonl", '{"text": "Anna", "spans": [{"start": 0, "end": 4, "label": "PER"}]}'),
    ("b.jsonl", '{"text": "a", "label": "x", "answer": "reject", "_task_hash": 1}'),
    ("c.json", '[{"data": {"text": "Anna"}, "annotations": [{"result": []}]}]'),
    ("d.csv", "text,annotation_id\nAnna,7\n"), ("e.jsonl", '["Anna", {"entities": []}]')])
def test_files_to_convert_name_the_command_that_does(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match="convert it once: ") as refused:
        list(read_table(tmp_path / file))
    command = str(refused.value).partition("convert it once: ")[2].split()[1:]
    assert command[0] == "examples/convert_annotations.py"
    run_main(*command)
    rows = [row for _, row in read_table(command[-1])]
    assert rows and not {"_task_hash", "annotation_id"} & rows[0].keys()


@pytest.mark.parametrize(("file", "text", "metrics", "labels"), [
    ("train.conllu", CONLLU, ("tag_accuracy",), {"VERB", "PRON", "ADP", "DET", "NOUN", "INTJ"}),
    ("train.conll", WNUT, ("span_f1",), {"O", "B-product"}),
    ("train.txt", "中 B\n国 E\n人 S\n是 S\n北 B\n京 I\n", ("span_f1",), {"B", "E", "S", "I"})])
def test_tags_without_prefix_are_scored_by_accuracy(tmp_path, file, text, metrics, labels):
    (tmp_path / file).write_text(text)
    split, _ = opened(tmp_path, "tags", converted(tmp_path / file), "val", texts=["tokens"],
                      label="tags")
    assert split.task.metrics == metrics and set(split.task.labels) == labels
    assert split.examples[0].label


@pytest.mark.parametrize("tag", ["_", "tag", "B-X,B-Y", "X-B I-Y X-I", "B_X I_X", "b-x"])
def test_tags_of_which_span_f1_would_count_something_else_are_refused(tmp_path, tag):
    tags = [*tag.split(), "O", *["B-X"] * (tag[1:2] != "_")]
    rows = [{"words": ["w"], "label": [part]} for part in tags]
    with pytest.raises(UserError, match="the tag '.*' is not of IOB, IOBES, BILOU or BMES .*which "
                       "span_f1 counts.*rename it, or take metrics = "):
        opened(tmp_path, "tags", rows)
    split, _ = opened(tmp_path, "tags", rows, metrics=["tag_accuracy"])
    assert split.task.metrics == ("tag_accuracy",)


def test_sentences_without_tags_are_left_out_by_name(tmp_path):
    (tmp_path / "a.conll").write_text("a O\nb B-X\n\nc _\nd _\n")
    split, _ = opened(tmp_path, "tags", converted(tmp_path / "a.conll"), texts=["tokens"],
                      label="tags", ignore_labels=[""])
    assert [example.sequences for example in split.examples] == [(("a b",),)]
    assert split.left_out == "1 of 2 rows are left out by ignore_labels"


@pytest.mark.parametrize(("words", "text"), [
    (list("경찰 이 왔다"), "경찰 이 왔다"), (["東京", "に", "行く", "。"], "東京に行く。"),
    (["ฉัน", "ชอบ", "Python"], "ฉันชอบ Python"), (["He", "is", "."], "He is ."),
    (list("他用iPhone打字了吗在北京"), "他用iPhone打字了吗在北京"), (["서울", "은"], "서울 은")])
def test_words_are_joined_as_their_script_is_written(tmp_path, words, text):
    rows = [{"words": words, "label": ["B-X"] + ["O"] * (len(words) - 1)}] * 2
    example = opened(tmp_path, "tags", rows)[0].examples[0]
    assert example.sequences == ((text,),)
    assert [text[span.start : span.end] for span in example.spans] == words


def test_numbers_of_the_hub_become_the_names_of_tags(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = ["O", "B-PER", "B-LOC"]
    features = datasets.Features({
        "tokens": datasets.List(datasets.Value("string")),
        "ner_tags": datasets.List(datasets.ClassLabel(names=names))})
    table = datasets.Dataset.from_dict({"tokens": [["Rome", ":", "a:b"], ["He"]],
                                        "ner_tags": [[2, 0, 0], [0]]}, features=features)
    table.to_parquet(str(tmp_path / "train.parquet"))
    split, _ = opened(tmp_path, "tags", (tmp_path / "train.parquet").read_bytes(),
                      table="train.parquet", texts=["tokens"], label="ner_tags", labels=names)
    assert [e.label for e in split.examples] == [(2, 0, 0), (0,)]
