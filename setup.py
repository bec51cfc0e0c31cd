"""Packaging metadata. Pinned versions of everything live in constraints.txt."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

# The address of the repository: also in mkdocs.yml, CITATION.cff and README.md, which
# tests/project/test_claims.py compares. It is a placeholder until the repository is public.
REPOSITORY = "https://github.com/deberta-ds/deberta_ds"

# What lies beside the package in a clone is inside it in an installation (base/command_line.py).
INSIDE = {f"deberta_ds.{folder}": folder for folder in ("launch", "data_prep", "ds_configs")}
SCRIPTS = [path for folder in ("launch", "data_prep") for path in Path(folder).glob("*.py")
           if path.stem != "demo" and '__name__ == "__main__"' in path.read_text(encoding="utf-8")]

# Training, evaluation and export need none of these (tests/project/test_extras.py); the table in
# docs/how-to/pretrain.md is compared with them.
EXTRAS = {
    "archives": ["fastwarc", "resiliparse", "lz4"],
    "languages": ["py3langid"],
    "mpi": ["mpi4py"],
    "neardup": ["datasketch"],
    "onnx": ["onnx", "onnxruntime"],
    "pages": ["matplotlib"],
    "trackers": ["wandb", "mlflow-skinny"],
}

setup(
    name="deberta_ds",
    version=runpy.run_path("deberta_ds/base/version.py")["__version__"],
    description="Pretrain, resume, export and fine-tune DeBERTa models on DeepSpeed",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    url=REPOSITORY,
    author="The deberta_ds maintainers",
    keywords="DeBERTa DeBERTaV3 pretraining ELECTRA RTD masked-language-model DeepSpeed ZeRO NLP",
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[*find_packages(include=["deberta_ds", "deberta_ds.*"]), *INSIDE],
    package_dir=INSIDE,
    package_data={"deberta_ds": ["py.typed", "**/*.json", "report/templates/*"],
                  "deberta_ds.launch": ["runs/**/*", "cluster/*"],
                  "deberta_ds.ds_configs": ["*"]},
    entry_points={"console_scripts": sorted(
        f"deberta-{path.stem.replace('_', '-')} = deberta_ds.__main__:main" for path in SCRIPTS)},
    install_requires=[
        "torch>=2.11",
        "deepspeed>=0.19.8,<0.20",
        "numpy",
        "pydantic>=2.10",
        "sentencepiece",
        "safetensors",
        "transformers>=5",
        "tokenizers",
        "datasets",
        "scipy",
        "tensorboard",
        "xxhash",
        "orjson",
        "zstandard",
        "jinja2",
        "fsspec",
        "psutil",
        "ninja",
    ],
    extras_require=EXTRAS | {
        "docs": ["mkdocs", "mkdocs-material"],
        "dev": ["mypy", "pytest", "pytest-xdist", "hypothesis", "ruff", "scikit-learn",
                "seqeval"],
    },
)
