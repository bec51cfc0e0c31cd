"""Write Hugging Face directories that AutoModel loads without remote code.

    DIR/config.json, model.safetensors     exactly the tensors of one transformers class
    DIR/pretraining_heads.safetensors      what that class drops: heads of pretraining, the absolute
                                           position table, the GDES delta (microsoft's names)
    DIR/spm.model, tokenizer.json ...      tokenizer
    DIR/generator/                         the same for the generator, as DebertaV2ForMaskedLM

transformers has no enhanced mask decoder: its masked-LM class gives other logits than the model was
trained with. `deberta_ds.evaluate.fill_mask` reads the side file and runs it.
"""

import json
from pathlib import Path

from torch import Tensor

from deberta_ds.base.errors import UserError, first_line
from deberta_ds.base.files import write_atomic
from deberta_ds.release import foreign, model_files, networks
from deberta_ds.release.networks import Network, Release
from deberta_ds.release.reader import SIDE_FILE

GENERATOR_DIRECTORY = "generator"
CLASS_PREFIX = {foreign.V1: "Deberta", foreign.V2: "DebertaV2"}
# transformers class: the tensors it owns next to the encoder's.
_HEAD_OF = {"Model": (), "ForMaskedLM": ("lm_predictions.",),
            "ForSequenceClassification": ("pooler.", "classifier."),
            "ForMultipleChoice": ("pooler.", "classifier."),
            "ForTokenClassification": ("classifier.",), "ForQuestionAnswering": ("qa_outputs.",)}


def write_hugging_face(release: Release, out: Path) -> list[str]:
    """Write a release as a Hugging Face directory; return notes on what went where."""
    notes, own = [], model_files.pad_id_of(release.tokenizer_files)
    for name, network in release.networks().items():
        directory = out / GENERATOR_DIRECTORY if name == "generator" else out
        notes += [f"{name}: {note}" for note in _write_network(network, directory, own)]
        notes += model_files.write_tokenizer_files(release.tokenizer_files, directory,
                                                   release.main.config.max_position)
    return notes


def model_type(network: Network) -> str:
    """Return "deberta" where transformers' v1 class can hold the encoder exactly."""
    is_v1 = foreign.is_v1_shape(network.config) and not network.config.key_bias
    return foreign.V1 if is_v1 else foreign.V2


def head_class(network: Network) -> str:
    """Return the end of the transformers class that holds the network: the fine-tuned one that the
    source names, if its heads are there, else what the heads say.
    """
    named = [name.removeprefix("Deberta").removeprefix("V2")
             for name in network.rest.get("architectures") or () if isinstance(name, str)]
    is_classifier = "classifier.weight" in network.tensors
    for end in named:
        if end in _HEAD_OF and end not in ("Model", "ForMaskedLM") and all(
                network.has(head) and (is_classifier or head != "classifier.")
                for head in _HEAD_OF[end]):
            return end
    if network.has("rtd_head."):
        return "Model"
    if network.has("pooler.") and is_classifier:
        # A classifier that scores each of several choices; v1 has no class for that.
        chooses = (_num_labels(network) > 1 and model_type(network) == foreign.V2
                   and network.tensors["classifier.weight"].size(0) == 1)
        return "ForMultipleChoice" if chooses else "ForSequenceClassification"
    if network.has("qa_outputs."):
        return "ForQuestionAnswering"
    if is_classifier and not network.has("proj."):
        return "ForTokenClassification"
    return "ForMaskedLM" if network.has("mlm_head.") else "Model"


def _num_labels(network: Network) -> int:
    """Return how many labels the source names, 0 if it names none."""
    return len(network.rest.get("id2label") or ())


def _write_network(network: Network, directory: Path, own: dict) -> list[str]:
    kind, head = model_type(network), head_class(network)
    main, side, notes = split_tensors(network, kind, head)
    values = foreign.to_hugging_face(network.config, kind=kind, rest=network.rest | own)
    values["architectures"] = [CLASS_PREFIX[kind] + head]
    values["dtype"] = "float32"  # what transformers 5 loads, and trains, files of 16 bits in
    if head == "ForMaskedLM":
        values["legacy"] = False  # the head with microsoft's names
        # It reads the embedding itself; asked to tie, transformers 4.48 to 5.19 cannot load it.
        values["tie_word_embeddings"] = False
    classes = main["classifier.weight"].size(0) if "classifier.weight" in main else 0
    if head != "ForMultipleChoice" and classes == 1 < _num_labels(network):
        del values["id2label"]  # a choice of a v1 model: one score for each
    if classes and not values.get("id2label"):
        values["id2label"] = {str(number): f"LABEL_{number}" for number in range(classes)}
        values["label2id"] = {f"LABEL_{number}": number for number in range(classes)}
    model_files.write_safetensors(directory / model_files.SAFETENSORS, main)
    if side:
        model_files.write_safetensors(directory / SIDE_FILE, side)
    write_atomic(directory / "config.json", json.dumps(values, indent=2, sort_keys=True) + "\n")
    return [f"written: {directory / model_files.SAFETENSORS} ({len(main)} tensors) as "
            f"{values['architectures'][0]}", *notes]


def split_tensors(network: Network, kind: str, head: str
                  ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Return (tensors of the transformers class, tensors it drops, notes), under their names."""
    config = network.config
    tensors, notes = network.tensors, []
    if kind == foreign.V2 and not config.key_bias:
        tensors = networks.with_zero_key_biases(network)
        notes.append("derived: zero key biases, which transformers' v2 class always has")
    theirs = foreign.to_theirs(tensors, config)
    theirs, added = networks.without_unread_rows(theirs, config)
    notes += added
    if kind == foreign.V1:
        theirs = foreign.pack_v1(theirs, config.num_heads)
        notes.append("mapped: query, key and value packed into in_proj (v1)")
    elif foreign.is_v1_shape(config):
        notes.append("mapped: v1 model with key biases, which transformers' v1 class cannot hold, "
                     "written as DebertaV2 without loss")
    dropped = {name for name in theirs if "._weight" in name or name == networks.UNREAD_ROWS}
    if not config.absolute_input:
        dropped.add("embeddings.position_embeddings.weight")
    main, side = {}, {}
    prefix = "" if head == "Model" else foreign.PREFIX
    for name, tensor in theirs.items():
        if foreign.is_encoder_name(name):
            if name in dropped:
                side[foreign.PREFIX + name] = tensor
            else:
                main[prefix + name] = tensor
        else:
            (main if name.startswith(_HEAD_OF[head]) else side)[name] = tensor
    notes += [f"kept aside: {name} in {SIDE_FILE}" for name in sorted(side)]
    return main, side, notes


# Upload an exported directory to the Hugging Face Hub, by huggingface_hub and its log-in.
PRIVATE_FILES = ("conversion.json",)  # names paths of this machine


def check_repository(name: str) -> None:
    """Raise UserError if the Hub would not take the name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push {name}: {first_line(error)}") from None


def push(directory: Path, repository: str, private: bool = False) -> str:
    """Upload all files in one commit, making the repository if there is none; return its address.

    UserError if the Hub rejects it, or cannot be reached; nothing is committed then.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi()
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        info = api.upload_folder(repo_id=repository, folder_path=directory,
                                 ignore_patterns=list(PRIVATE_FILES),  # it adds its own
                                 commit_message="Upload a model exported by deberta_ds")
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError, RuntimeError, ValueError) as error:
        # The library wraps what is said of a large file: RuntimeError, or ValueError of a batch.
        said = first_line(error.__cause__ or error)
        options = " --private" * private + "".join(f" --exclude {name}" for name in PRIVATE_FILES)
        raise UserError(f"{repository}: the Hub did not take it ({said}); {directory} "
                        "is whole: log in with `hf auth login` and upload it with `hf upload "
                        f"{repository} {directory}{options}`") from error
    return str(info.commit_url)
