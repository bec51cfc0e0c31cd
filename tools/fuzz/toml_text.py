"""Nested values as TOML text."""

import json


def toml(values: dict, prefix: str = "") -> str:
    """Return nested values as TOML; values that TOML does not have become texts."""
    plain = [f"{_key(key)} = {toml_value(child)}" for key, child in values.items()
             if not isinstance(child, dict)]
    tables = [f"[{prefix}{_key(key)}]\n{toml(child, f'{prefix}{_key(key)}.')}"
              for key, child in values.items() if isinstance(child, dict)]
    return "\n".join([*plain, *tables]) + "\n"


def _key(key: str) -> str:
    return key if key and key.isascii() and key.replace("_", "a").isalnum() else json.dumps(key)


def toml_value(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value) if value is not None else '""'
