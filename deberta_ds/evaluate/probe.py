"""How well frozen states tell classes apart: logistic regression by scikit-learn, nothing trained.

What fine-tuning hides (it can learn a task from scratch) a probe shows. States are the mean over
the pieces of the text, or [CLS]; a pair of texts is one input, [CLS] a [SEP] b [SEP], as in
fine-tuning. Features are scaled by the training texts, and the strength of the regularization is
chosen by cross-validation inside them.
"""

import sys
import warnings
from pathlib import Path

import numpy as np
import torch

from deberta_ds.base.errors import UserError, listed
from deberta_ds.corpus.tables import read_table
from deberta_ds.evaluate.pair_scores import cut_work
from deberta_ds.release.reader import LoadedModel
from deberta_ds.tokenizer.text import BadTextError, normalise

_STRENGTHS = np.logspace(-4, 2, 7)
_DRAWS = 10_000


def read_examples(path: str | Path, keys: list[str], label: str) -> tuple[list[tuple], list]:
    """Return the texts under `keys` and the labels of a table; UserError names a bad row."""
    texts, labels = [], []
    for place, row in read_table(path):
        if not isinstance(row, dict):
            raise UserError(f"{place}: must be a JSON object")
        if lost := [key for key in (*keys, label) if key not in row]:
            raise UserError(f"{place}: no {lost[0]!r} (found: {listed(list(row))}); see --text and "
                            "--label")
        *found, name = (row[key] for key in (*keys, label))
        try:
            texts.append(tuple(normalise(text) if isinstance(text, str) else "" for text in found))
        except BadTextError as error:
            raise UserError(f"{place}: {error}") from None
        if not any(texts[-1]) or not all(isinstance(text, str) for text in found):
            raise UserError(f"{place}: must have text under {', '.join(keys)}, found {found!r:.40}")
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise UserError(f"{place}: the label must be text or a whole number, found {name!r}")
        labels.append(str(name))
    if len(set(labels)) < 2:
        raise UserError(f"{path}: {len(labels)} examples of {len(set(labels))} classes; a probe "
                        "needs at least two classes")
    return texts, labels


@torch.no_grad()
def features(model: LoadedModel, texts: list[tuple], pooling: str) -> np.ndarray:
    """Return the pooled last states of each input, fp32 [inputs, hidden]; long ones are cut."""
    ids, cut = zip(*[_encode(model, text) for text in texts], strict=True)
    if any(cut):
        print(f"note: {sum(cut):,} of {len(cut):,} inputs were cut to the model's "
              f"{model.model_config.max_position:,} positions", file=sys.stderr, flush=True)
    if empty := [text for text, found in zip(texts, ids, strict=True)
                 if len(found) == 1 + len(text)]:
        raise UserError(f"the tokenizer has no token for {empty[0]!r} ({len(empty)} inputs of "
                        f"{len(texts)}); take such inputs out")
    found = np.empty((len(ids), model.model_config.hidden_size), dtype=np.float32)
    for items in cut_work(np.array([len(one) for one in ids])):
        inputs_BL = torch.tensor([ids[item] for item in items],
                                 device=model.backbone.words.weight.device)
        states_BLC = model.backbone(inputs_BL, torch.ones_like(inputs_BL, dtype=torch.int32))
        pooled_BC = states_BLC[:, 0] if pooling == "cls" else states_BLC[:, 1:-1].mean(1)
        found[items] = pooled_BC.cpu().numpy()
    return found


def _encode(model: LoadedModel, text: tuple) -> tuple[list[int], bool]:
    """Return [CLS] a [SEP] (b [SEP]), the longer text cut until it fits, and whether it was cut."""
    tokenizer = model.tokenizer
    assert tokenizer is not None  # the model was loaded for text
    parts = [tokenizer.encode(part) for part in text]
    room = model.model_config.max_position - 1 - len(parts)
    is_cut = sum(map(len, parts)) > room
    while sum(map(len, parts)) > room:
        max(parts, key=len).pop()
    ids = [tokenizer.cls_id, *(token for part in parts for token in [*part, tokenizer.sep_id])]
    return ids, is_cut


def probe(train: np.ndarray, train_labels: list, test: np.ndarray, test_labels: list) -> dict:
    """Return accuracy, its 95 % interval over test examples, and the majority class's accuracy."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    counts = {label: train_labels.count(label) for label in sorted(set(train_labels))}
    if unknown := [label for label in test_labels if label not in counts]:
        raise UserError(f"--test: {len(unknown):,} of {len(test_labels):,} labels are none of "
                        f"--train's, such as {unknown[0]!r}; its classes: {listed(list(counts))}")
    folds = min(5, *counts.values())
    if folds < 2:
        alone = min(counts, key=counts.__getitem__)
        raise UserError(f"--train: class {alone!r} has a single example; a probe needs at least "
                        "two of each")
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    search = GridSearchCV(pipeline, {"logisticregression__C": _STRENGTHS}, cv=folds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of strengths that are not chosen
        search.fit(train, train_labels)
    right = search.predict(test) == np.array(test_labels)
    draws = np.random.default_rng(0).binomial(len(right), right.mean(), _DRAWS) / len(right)
    majority = max(counts, key=counts.__getitem__)
    return {"accuracy": float(right.mean()),
            "interval": [float(value) for value in np.percentile(draws, [2.5, 97.5])],
            "majority": float(np.mean(np.array(test_labels) == majority)),
            "strength": float(search.best_params_["logisticregression__C"]),
            "train": len(train_labels), "test": len(test_labels)}
