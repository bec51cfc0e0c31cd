"""The page of minimal_pairs.json: a bar a phenomenon, with published models and chance beside."""

from dataclasses import dataclass

from deberta_ds.report.pages import render
from deberta_ds.report.tables import Cell, Table


@dataclass(frozen=True)
class Bar:
    """One group of pairs: accuracy and interval in percent, and marks of published models."""

    name: str
    value: float
    low: float
    high: float
    marks: list[tuple[str, float]]


def pairs_page(result: dict, titles: dict[str, str], published: dict[str, dict[str, float]]
               ) -> str:
    """Return one self-contained HTML document.

    result: minimal_pairs.json. titles: {scorer: how it is called}. published: {model: {"overall" or
    phenomenon: accuracy}}, empty where none applies.
    """
    charts = [(titles[name], _bars(result["scorers"][name], published))
              for name in result["headlines"]]
    return render("pairs.html", model=result["model"], data=result["data"], charts=charts,
                  pairs=f"{result['pairs']:,}", interval=result["interval"],
                  overall=charts[0][1][0], table=_table(result, titles, published))


def _bars(scores: dict, published: dict) -> list[Bar]:
    groups = {"overall": scores} | scores["phenomena"]
    return [Bar(name.replace("_", " "), *(round(100 * value, 1) for value in (
                group["accuracy"], *group["interval"])),
                [(model, round(100 * column[name], 1)) for model, column in published.items()])
            for name, group in groups.items()]


def _table(result: dict, titles: dict[str, str], published: dict) -> Table:
    head = [Cell("Phenomenon", kind=""), *(Cell(titles[name]) for name in result["scorers"]),
            *map(Cell, published)]
    rows = []
    for name in ("overall", *next(iter(result["scorers"].values()))["phenomena"]):
        groups = [scores if name == "overall" else scores["phenomena"][name]
                  for scores in result["scorers"].values()]
        rows.append([Cell(name.replace("_", " "), kind=""),
                     *(Cell(f"{100 * group['accuracy']:.1f}") for group in groups),
                     *(Cell(f"{100 * column[name]:.1f}") for column in published.values())])
    return Table("All scorers", "Percent of pairs in which the grammatical sentence has the higher "
                 "score. Chance is 50.", head, rows)
