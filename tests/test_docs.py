"""The documentation: its snippets run, its links lead somewhere, its commands and messages exist, its maps are true."""

import ast
import contextlib
import importlib.util
import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import typer

from mmlda.cli import app

ROOT = Path(__file__).parent.parent
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "mmlda"
PAGES = [DOCS / "getting-started.md", *sorted((DOCS / "how-to").glob("*.md"))]
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.S | re.M)


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


# ---------------------------------------------------------------------------------------------------- snippets


def masked(line):
    """A printed line with its numbers taken out: they differ between versions and threads."""
    return " ".join(re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?", "#", line).split())


def run_page(page, folder, monkeypatch):
    """Execute a page's Python in one namespace; then what it printed must look like what the page shows."""
    text, space, said = page.read_text(), {"__name__": "docs"}, []
    monkeypatch.chdir(folder)
    for block in FENCE.finditer(text):
        kind, code = block[1].strip(), block[2]
        line = text.count("\n", 0, block.start()) + 1
        if kind == "python no-run":
            before = text[: block.start()].rstrip().rsplit("\n", 1)[-1]
            assert before.startswith("<!-- no-run: "), f"{page.name}:{line}: no-run without a reason"
        elif kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out), torch.random.fork_rng(devices=[]):  # pages set the seed
                exec(compile("\n" * line + code, str(page), "exec"), space)
            said = [masked(printed) for printed in out.getvalue().splitlines()]
        elif kind == "text":
            for shown in code.splitlines():
                if shown.strip() and not shown.startswith("..."):
                    start = masked(shown.removesuffix(" ..."))
                    close = [printed for printed in said if printed.startswith(start)]
                    assert close, f"{page.name}:{line}: {shown!r} is shown, and printed was {said}"


@pytest.mark.parametrize("page", names(page for page in PAGES if page.name != "ray-cluster.md"))
def test_the_snippets_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    run_page(ROOT / page, tmp_path, monkeypatch)


@pytest.mark.long
def test_the_snippets_for_a_cluster_run(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="the extra mmlda[ray] is not installed")
    run_page(DOCS / "how-to" / "ray-cluster.md", tmp_path, monkeypatch)


def test_a_snippet_that_fails_or_prints_something_else_is_noticed(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    for content, error in [("```python\n1 / 0\n```\n", ZeroDivisionError),
                           ("```python\nprint('a 1')\n```\n\n```text\nb 1\n```\n", AssertionError),
                           ("```python no-run\n1\n```\n", AssertionError)]:  # fmt: skip
        page.write_text(content)
        with pytest.raises(error):
            run_page(page, tmp_path, monkeypatch)
    page.write_text("```python\nprint('took 1.5 s, done')\n```\n\n```text\ntook 27 s, ...\n```\n")
    run_page(page, tmp_path, monkeypatch)


@pytest.mark.parametrize("page", names(sorted((DOCS / "how-to").glob("*.md"))))
def test_how_to_pages_stay_short(page):
    assert len((ROOT / page).read_text().splitlines()) <= 120


# ---------------------------------------------------------------------------------------------------- links


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(path):
    """GitHub's anchors of a page's headings; a second one of the same name has a number."""
    seen, found = {}, set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
        found.add(slug if slug not in seen else f"{slug}-{seen[slug]}")
        seen[slug] = seen.get(slug, 0) + 1
    return found


def broken_links(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", names(PROSE))
def test_links_lead_to_files_and_headings_that_exist(page):
    assert not broken_links(ROOT / page)


def test_broken_links_are_noticed(tmp_path):
    (tmp_path / "other.md").write_text("# Some `code`, and more\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#some-code-and-more) [b](other.md#twice-1) `[c](no.md)` [d](https://example.org)\n")
    assert broken_links(page) == []
    page.write_text("[a](other.md#some) [b](other.md#twice-2) [c](no.md)\n")
    assert broken_links(page) == ["other.md#some", "other.md#twice-2", "no.md"]


def test_the_index_names_every_page():
    index = (DOCS / "README.md").read_text()
    for page in DOCS.rglob("*.md"):
        if page != DOCS / "README.md":
            assert f"]({page.relative_to(DOCS)})" in index, page


# ---------------------------------------------------------------------------------------------------- commands


def commands(text):
    """Command lines of mmlda in code that is no Python: after a prompt, or indented."""
    lines = [line for kind, code in FENCE.findall(text) if kind in ("console", "sh", "bash", "") for line in
             code.splitlines()]  # fmt: skip
    lines += [line for line in FENCE.sub("", text).splitlines() if line.startswith("    ")]
    for line in lines:
        for part in line.strip().removeprefix("$ ").split("&&"):
            if found := re.match(r"(?:torchrun .*-m |python -m )?mmlda\s+(\S.*)", part.strip()):
                yield shlex.split(found[1], comments=True)


def parse(words):
    """Parse a command line as the program would, without running it."""
    command = typer.main.get_command(app)
    if words[0].startswith("--"):
        assert words[0] in [name for option in command.params for name in option.opts], words
        return
    words = list(words)
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, words
        command = command.commands[words.pop(0)]
    command.make_context("mmlda", words)


@pytest.mark.parametrize("page", names(PROSE))
def test_commands_have_the_subcommands_and_options_shown(page):
    text = (ROOT / page).read_text()
    for words in commands(text):
        parse(words)
    for code in re.findall(r"`mmlda ([a-z][^`\n]*)`", FENCE.sub("", text)):  # in a sentence: names and options only
        command = typer.main.get_command(app)
        words = re.split(r"[\s|,]+", code)
        while hasattr(command, "commands") and words:
            assert words[0] in command.commands, code
            command = command.commands[words.pop(0)]
        options = {name for option in command.params for name in option.opts}
        assert {word for word in words if word.startswith("-")} <= options, code


@pytest.mark.parametrize("line", ["$ mmlda trian --data digits", "$ mmlda train --dta digits", "$ mmlda data get mnist",
                                  "$ torchrun -m mmlda train --eps 3"])  # fmt: skip
def test_a_command_that_does_not_exist_is_noticed(line):
    (words,) = commands(f"```console\n{line}\n```\n")
    with pytest.raises(Exception):  # noqa: B017 - an AssertionError, or click's own
        parse(words)


def test_there_are_commands_to_check():
    assert sum(len(list(commands(page.read_text()))) for page in PAGES) > 15


# ---------------------------------------------------------------------------------------------------- messages


def literals():
    """Every string of the sources, with a gap where an f-string has a value."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def said_somewhere(message, strings):
    """Whether one string of the sources has the message, whose `...` stand for anything."""
    parts = [part for part in message.split("...") if part.strip()]
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in parts), re.S)
    return any(pattern.search(text) for text in strings)


@pytest.mark.parametrize("page", names(PAGES))
def test_messages_shown_are_in_the_sources(page):
    strings = literals()
    rows = re.findall(r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", (ROOT / page).read_text(), re.M)
    for table in rows:
        for row in table.splitlines():
            cell = row.split("|")[1].strip()
            if cell.startswith("`"):
                assert said_somewhere(cell.split("`")[1], strings), cell
    assert rows


def test_a_message_nobody_gives_is_noticed():
    strings = literals()
    assert said_somewhere("eps = ...: expected a radius between 0 and 1, the range of the images", strings)
    assert not said_somewhere("eps = ...: expected a happy number", strings)


# ---------------------------------------------------------------------------------------------------- the paper


def test_the_rules_of_the_verdicts_are_those_of_the_code():
    rules = {}
    for path in (SOURCE / "paper").glob("*.py"):
        tree = ast.parse(path.read_text())
        named = {getattr(node.targets[0], "id", ""): node.value for node in tree.body if isinstance(node, ast.Assign)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "claim":
                name = node.args[1]
                key = name.value if isinstance(name, ast.Constant) else name.values[0].value.rstrip("-")
                rule = next(word.value for word in node.keywords if word.arg == "rule")
                rules[key] = (named[rule.id] if isinstance(rule, ast.Name) else rule).value
    text = (DOCS / "how-to" / "reproduce-the-paper.md").read_text()
    shown = dict(re.findall(r"^\| ([\w-]+) \| (.*) \|$", text.split("## The rules of the verdicts")[1], re.M))
    shown.pop("claim", None)
    shown.pop("message", None)
    assert shown == rules and len(rules) == 13


def test_every_part_of_the_paper_is_described():
    from mmlda.paper import PARTS

    text = (DOCS / "how-to" / "reproduce-the-paper.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.M)) == {*PARTS, "all"}


# ---------------------------------------------------------------------------------------------------- reference


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(maker):
    assert (DOCS / "reference.md").read_text() == maker.page(), "run python docs/make_reference.py"


def test_the_reference_has_every_public_name(maker):
    import mmlda

    text = maker.page()
    assert text == maker.page() and " at 0x" not in text
    for name in set(mmlda.__all__) - {"__version__"}:
        assert re.search(rf"^###+ `mmlda\.{name}`$", text, re.M), name
    for name in mmlda.attacks.__all__:
        assert f"#### `mmlda.attacks.{name}`" in text


def test_a_docstring_becomes_markdown(maker):
    def function(a: int, *, b: str = "x") -> None:
        """Does it.

        Args:
            a: a number, which
                goes on.
            b: a word.

        >>> 1 + 1
        2
        """

    assert maker.text(function) == ("Does it.\n\n\n- `a`: a number, which\n  goes on.\n- `b`: a word.\n\n\n```pycon\n"
                                    ">>> 1 + 1\n2\n```")  # fmt: skip
    assert maker.call("function", function) == "function(a: int, *, b: str = 'x')"


# ---------------------------------------------------------------------------------------------------- the house


def room_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path):
    """What a file imports, wherever it does: (dotted name, whether it is done on import)."""
    found = []

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, not inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{path}: a relative import"
                found.extend((f"{child.module}.{alias.name}", not inside) for alias in child.names)
            typing_only = isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"
            visit(child, inside or typing_only or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(ast.parse(path.read_text()), False)
    return found


def table():
    """Rooms in order, each with what it may import, from docs/architecture.md."""
    text = (DOCS / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$", text, re.M)
    return {room: allowed for room, allowed in rows}


ROOMS = table()
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.name != "__main__.py" and path != SOURCE / "__init__.py"]


def test_every_module_is_a_room_and_every_room_is_there():
    assert set(ROOMS) == {room_of(path) for path in FILES}
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for room in set(ROOMS) - {"_version"}:
        name = f"{room}/" if (SOURCE / room).is_dir() else f"{room}.py"
        assert f"`{name}`" in contributing, f"{name} is not among CONTRIBUTING.md's rooms"
    differs = (DOCS / "architecture.md").read_text().split("## Where the layout differs")[1]
    planned = {"theory", "means", "head", "models", "data", "attacks", "training", "sweeps", "evaluation", "masking",
               "results", "zoo", "_version"}  # fmt: skip
    for room in set(ROOMS) - planned:
        assert f"`{room}.py`" in differs or f"`{room}/`" in differs, room


def test_rooms_may_import_only_what_stands_above_them():
    above = []
    for room, allowed in ROOMS.items():
        listed = re.findall(r"`(\w+)`", allowed)
        assert listed or allowed in ("nothing", "anything above"), (room, allowed)
        assert set(listed) <= set(above), f"{room} may import {set(listed) - set(above)}, which stand below it"
        above.append(room)


@pytest.mark.parametrize("path", names(FILES))
def test_imports_are_those_the_table_allows(path):
    room = room_of(ROOT / path)
    allowed = set(re.findall(r"`(\w+)`", ROOMS[room])) | {room}
    if ROOMS[room] == "anything above":
        return
    for name, _ in imports(ROOT / path):
        if name.split(".")[0] == "mmlda":
            assert "." in name, f"{path} imports the whole package"
            assert name.split(".")[1] in allowed, f"{path} imports {name}, which docs/architecture.md does not allow"


def reachable(room):
    """The files of a room and of every room it comes to."""
    seen, todo = set(), [room]
    while todo:
        if (room := todo.pop()) not in seen:
            seen.add(room)
            files = [path for path in FILES if room_of(path) == room]
            todo += [name.split(".")[1] for path in files for name, _ in imports(path) if name.startswith("mmlda.")]
    return seen, [path for path in FILES if room_of(path) in seen]


@pytest.mark.parametrize("room, never", [
    ("attacks", {"safetensors", "rich"}),
    ("results", {"torch", "numpy", "safetensors"}),
    ("report", {"torch"}),
    ("files", {"torch", "numpy"}),
])  # fmt: skip
def test_what_a_room_never_comes_to(room, never):
    rooms, files = reachable(room)
    assert rooms <= {"attacks": {"attacks"}, "results": {"results", "files"}, "files": {"files"},
                     "report": {"report", "results", "files"}}[room]  # fmt: skip
    outside = {name.split(".")[0] for path in files for name, _ in imports(path)}
    assert not outside & never
    if room in ("results", "files"):
        assert outside - {"mmlda"} <= sys.stdlib_module_names


def test_theory_and_training_stay_apart():
    for room in ("theory", "means"):
        assert reachable(room)[0] <= {"theory", "means", "integrals"}
    assert not reachable("training")[0] & {"evaluation", "masking", "results", "report", "paper", "sweeps", "cli"}
    assert not reachable("evaluation")[0] & {"training", "step", "sweeps"}


def test_what_is_heavy_is_imported_where_it_is_used():
    heavy = {"matplotlib", "sklearn", "scipy", "jinja2", "PIL", "ray", "foolbox", "rich", "triton"}
    for path in FILES:
        first = {name.split(".")[0] for name, at_once in imports(path) if at_once}
        assert not first & (heavy - ({"triton"} if room_of(path) == "triton_conv" else set())), path
        assert "typer" not in first or room_of(path) == "cli", path
        assert not {name.split(".")[0] for name, _ in imports(path)} & {"pickle", "dill"} or room_of(path) == "formats"
