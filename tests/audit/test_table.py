"""The table of docs/audit.md and the script that writes it."""

import pytest


def shown(maker):
    """The cells of the table by network."""
    between = maker.PAGE.read_text().split(maker.BEGIN)[1].split(maker.END)[0]
    rows = [line for line in between.splitlines() if line.startswith("| ") and not line.startswith("| *")]
    cells = [line.strip("| ").split(" | ") for line in rows[1:]]
    return {row[0]: row for row in cells}


def test_the_table_has_the_networks_of_its_script(maker):
    page, rows = maker.PAGE.read_text(), shown(maker)
    entries = {name: entry for group in maker.TABLE.values() for name, entry in group.items()}
    assert list(rows) == list(entries)
    assert maker.put(maker.put(page, "new\n"), page.split(maker.BEGIN)[1].split(maker.END)[0]) == page
    for name, entry in entries.items():
        assert rows[name][1] == " / ".join(f"{eps:g}" for eps in entry.radii)
        verdicts = [verdict.removesuffix(maker.CLOSE) for verdict in rows[name][-1].split(" / ")]
        assert len(verdicts) == len(entry.radii) and set(verdicts) <= {"real", "none", "masked", "mixed"}


@pytest.mark.long
@pytest.mark.parametrize("name", ["SR, probabilities", "SR, input rounded to 8 levels", "adversarially trained SR"])
def test_the_table_has_the_verdicts_that_its_script_finds(maker, name):
    """Numbers differ a little between machines; a verdict that is close on one of them may differ too."""
    (entry,) = (group[name] for group in maker.TABLE.values() if name in group)
    found = maker.audits(entry)
    row, again = shown(maker)[name], maker.row(name, found).strip("| ").split(" | ")
    assert (row[1], row[3]) == (again[1], again[3])
    for result, verdict in zip(found, row[-1].split(" / "), strict=True):
        assert verdict.endswith(maker.CLOSE) or verdict in result.possible, result
