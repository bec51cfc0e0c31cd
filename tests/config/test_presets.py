"""Exact parameter counts of the public models (counted from the official code)."""

import dataclasses

import pytest

from deberta_ds.config.model import MODELS
from deberta_ds.config.run_config import ModelConfig, ObjectiveConfig
from deberta_ds.model.backbone import Backbone, count_parameters, on_meta
from deberta_ds.objectives.mlm import MlmModel
from deberta_ds.objectives.rtd import Discriminator, RtdModel

# preset: (Hugging Face backbone, official MaskedLanguageModel)
COUNTS = {
    "deberta-base": (138_601_728, 139_655_769),
    "deberta-large": (405_163_008, 406_838_361),
    "deberta-xlarge": (757_804_032, 759_528_537),
    "deberta-v2-xlarge": (884_593_152, 887_871_588),
    "deberta-v2-xxlarge": (1_564_549_632, 1_567_828_068),
    "deberta-v3-xsmall": (70_682_112, 71_155_428),
    "deberta-v3-small": (141_304_320, 142_417_764),
    "deberta-v3-base": (183_831_552, 184_944_996),
    "deberta-v3-large": (434_012_160, 435_716_196),
    "mdeberta-v3-base": (278_218_752, 279_455_096),
}
GENERATORS = {  # preset of the discriminator: (backbone, official MaskedLanguageModel)
    "deberta-v3-xsmall": (60_035_328, 60_508_644),
    "deberta-v3-small": (120_040_704, 121_154_148),
    "deberta-v3-base": (141_304_320, 142_417_764),
    "deberta-v3-large": (282_857_472, 284_561_508),
}
RTD_HEADED = {  # official ReplacedTokenDetection, which also owns an unused position table
    "deberta-v3-xsmall": 71_027_713,
    "deberta-v3-base": 184_817_665,
    "deberta-v3-large": 435_589_121,
}


@pytest.mark.parametrize("preset", COUNTS)
def test_backbone_and_masked_lm(preset):
    config = ModelConfig(**MODELS[preset])
    backbone, masked_lm = COUNTS[preset]
    if not config.key_bias:  # official v1 models carry two more, inert, biases per layer
        masked_lm -= 2 * config.hidden_size * config.num_layers
    assert count_parameters(on_meta(Backbone, config)) == backbone
    assert count_parameters(on_meta(MlmModel, config)) == masked_lm


@pytest.mark.parametrize("preset", GENERATORS)
def test_generator(preset):
    config = ModelConfig(**MODELS[preset])
    half = dataclasses.replace(config, num_layers=config.num_layers // 2)
    assert count_parameters(on_meta(Backbone, half)) == GENERATORS[preset][0]
    assert count_parameters(on_meta(MlmModel, half)) == GENERATORS[preset][1]


@pytest.mark.parametrize("preset", RTD_HEADED)
def test_discriminator(preset):
    config = ModelConfig(**MODELS[preset])
    unused = config.max_position * config.hidden_size
    count = count_parameters(on_meta(Discriminator, config, "gdes"))
    assert count == RTD_HEADED[preset] - unused


def test_sharing_decides_which_word_tables_exist():
    config = ModelConfig(**MODELS["tiny"])
    table = config.vocab_size * config.hidden_size

    def count(sharing):
        objective = ObjectiveConfig(kind="rtd", embedding_sharing=sharing)
        with_sharing = on_meta(lambda: RtdModel(config, config, objective, sampling_seed=0))
        return count_parameters(with_sharing)

    assert count("gdes") == count("nes") == count("es") + table
