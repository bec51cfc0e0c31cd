"""Packaging metadata. Pinned versions of everything live in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="deberta_ds",
    version="0.1.0",
    description="Pretrain, resume, export and fine-tune DeBERTa models on DeepSpeed",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["deberta_ds", "deberta_ds.*"]),
    package_data={"deberta_ds": ["**/*.json", "report/templates/*"]},
    install_requires=[
        "torch>=2.11",
        "deepspeed>=0.19.8,<0.20",
        "numpy",
        "pydantic>=2",
        "sentencepiece",
        "safetensors",
        "transformers>=5",
        "datasets",
        "scikit-learn",
        "tensorboard",
        "matplotlib",
        "xxhash",
        "orjson",
        "zstandard",
        "tqdm",
        "jinja2",
        "fsspec",
        "psutil",
        "ninja",
    ],
    extras_require={
        "mpi": ["mpi4py"],
        "neardup": ["datasketch"],
        "onnx": ["onnx", "onnxruntime"],
        "languages": ["py3langid"],
        "trackers": ["wandb", "mlflow-skinny"],
        "dev": ["py3langid", "pytest", "pytest-xdist", "hypothesis", "ruff"],
    },
)
