"""Take each private part of DeepSpeed away in turn; write what the check says: OUT.json."""

import json
import sys

from workers.traps import build

from deberta_ds.base.errors import UserError
from deberta_ds.engine.engine import (
    ENGINE_PARTS,
    OPTIMIZER_PARTS,
    ZERO3_PARAMETER_PARTS,
    check_engine,
    check_parts,
    init_distributed,
)


class Without:
    """`thing` as it is, but for one attribute, which may lie deeper: "optimizer.state"."""

    def __init__(self, thing, dotted_name: str):
        self._thing = thing
        self._name, _, self._rest = dotted_name.partition(".")

    def __getattr__(self, name: str):
        if name != self._name:
            return getattr(self._thing, name)
        if not self._rest:
            raise AttributeError(name)
        return Without(getattr(self._thing, name), self._rest)


def complaint(owner: str, thing, names: tuple[str, ...], missing: str) -> str:
    try:
        check_parts(owner, Without(thing, missing), names)
        return ""
    except UserError as error:
        return str(error)


def main() -> None:
    init_distributed()
    found = {}
    for stage in (0, 1, 2, 3):
        engine = build(stage)
        check_engine(engine)
        parameter = next(engine.module.parameters())
        of_wrapper = OPTIMIZER_PARTS.get(type(engine.optimizer).__name__, ())
        assert bool(of_wrapper) == (stage > 0)
        of_parameter = ZERO3_PARAMETER_PARTS if stage == 3 else ()
        for owner, thing, names in (("engine", engine, ENGINE_PARTS),
                                    ("optimizer", engine.optimizer, of_wrapper),
                                    ("parameter", parameter, of_parameter)):
            for name in names:
                found[f"{stage} {owner} {name}"] = complaint(owner, thing, names, name)
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
