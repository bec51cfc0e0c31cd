"""Load a model for use: the encoder that is fine-tuned, its tokenizer, its pretraining heads."""

from dataclasses import dataclass, field
from pathlib import Path

from deberta_ds.base.errors import UserError
from deberta_ds.config.run_config import ModelConfig
from deberta_ds.model.backbone import Backbone
from deberta_ds.model.embeddings import TokenEmbedding
from deberta_ds.model.heads import MaskedLm, ReplacedTokenHead
from deberta_ds.release import release as networks
from deberta_ds.release.reader import read_release
from deberta_ds.tokenizer import Tokenizer


@dataclass
class LoadedModel:
    """A model in fp32 on the CPU, in evaluation mode.

    backbone: ids and mask -> hidden states; the discriminator of a replaced-token run.
    tokenizer: None where the source has none that is read.
    masked_lm: (token embedding, MaskedLm) of the model itself or, if it has no masked-LM head with
    a position table, of the generator next to it; None without either. Its layers are its own.
    replaced_token_head: of the backbone, where the source has it.
    identity: digests of what was read.
    """

    backbone: Backbone
    tokenizer: Tokenizer | None
    model_config: ModelConfig
    masked_lm: tuple[TokenEmbedding, MaskedLm] | None
    replaced_token_head: ReplacedTokenHead | None = None
    identity: dict[str, str] = field(default_factory=dict)

    def check_length(self, tokens: int, place: str | Path) -> None:
        """UserError if rows of `tokens` are longer than the positions of this model, of `place`."""
        if tokens > self.model_config.max_position:
            raise UserError(f"{place}: has {self.model_config.max_position} positions, but the "
                            f"rows have up to {tokens} tokens")


def load_backbone(path: str | Path, tokenizer: str | Path | None = None, *, for_text: bool = False
                  ) -> LoadedModel:
    """Return the model at `path`: our checkpoint, run or directory, Hugging Face, or microsoft.

    `tokenizer` is the path of the one it was trained with, where there is none next to it;
    `for_text` says that one is needed. Raises UserError for a missing, damaged or foreign model.
    """
    release = read_release(path, tokenizer)
    if for_text and release.tokenizer is None:
        Tokenizer.of_files(release.tokenizer_files, Path(path))  # says what is missing
    main = release.main
    decoding = next((one for one in release.networks().values() if one.has_masked_lm), None)
    masked_lm = None
    if decoding is not None:
        masked_lm = networks.build_masked_lm(networks.Network(decoding.config, {
            name: tensor.float().clone() for name, tensor in decoding.tensors.items()}))
    head = networks.build_replaced_token_head(main) if main.has("rtd_head.") else None
    return LoadedModel(networks.build_backbone(main), release.tokenizer, main.config, masked_lm,
                       head, release.identity)
