"""The documentation as Markdown: its Python runs as printed, and its links, commands and messages exist."""

import ast
import contextlib
import doctest
import io
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

from mmlda.cli import app

ROOT = Path(__file__).parents[2]
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "mmlda"
GUIDES = [DOCS / "getting-started.md", *sorted((DOCS / "how-to").glob("*.md"))]
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.S | re.M)


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


# ---------------------------------------------------------------------------------------------------- snippets


def masked(line):
    """A printed line without its numbers: they differ between versions and threads."""
    return " ".join(re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?", "#", line).split())


def run_page(page, folder, monkeypatch):
    """Execute a page's Python in one namespace and compare what it prints with what the page shows."""
    text, space, printed = page.read_text(), {"__name__": "docs"}, []
    monkeypatch.chdir(folder)
    for block in FENCE.finditer(text):
        kind, code = block[1].strip(), block[2]
        line = text.count("\n", 0, block.start()) + 1
        if kind == "python no-run":
            before = text[: block.start()].rstrip().rsplit("\n", 1)[-1]
            assert before.startswith("<!-- no-run: "), f"{page.name}:{line}: no-run without a reason"
        elif kind == "python" and code.startswith(">>>"):
            example = doctest.DocTestParser().get_doctest(code, space, page.name, str(page), line)
            assert not doctest.DocTestRunner().run(example, clear_globs=False).failed
            space.update(example.globs)
        elif kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out), torch.random.fork_rng(devices=[]):  # pages set the seed
                exec(compile("\n" * line + code, str(page), "exec"), space)
            printed = [masked(shown) for shown in out.getvalue().splitlines()]
        elif kind == "text":
            for shown in code.splitlines():
                if shown.strip() and not shown.startswith("..."):
                    start = masked(shown.removesuffix(" ..."))
                    assert any(real.startswith(start) for real in printed), (
                        f"{page.name}:{line}: {shown!r}, got {printed}"
                    )


def has_python(path):
    return any(kind.startswith("python") for kind, _ in FENCE.findall(path.read_text()))


@pytest.mark.parametrize("page", names(page for page in PROSE if has_python(page) and page.name != "ray-cluster.md"))
def test_the_snippets_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    run_page(ROOT / page, tmp_path, monkeypatch)


@pytest.mark.long
def test_the_snippets_for_a_cluster_run(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="the extra mmlda[ray] is not installed")
    run_page(DOCS / "how-to" / "ray-cluster.md", tmp_path, monkeypatch)


def test_a_snippet_that_fails_or_prints_something_else_is_noticed(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    for content, error in [
        ("```python\n1 / 0\n```\n", ZeroDivisionError),
        ("```python\n>>> 1 + 1\n3\n\n```\n", AssertionError),
        ("```python\nprint('a 1')\n```\n\n```text\nb 1\n```\n", AssertionError),
        ("```python no-run\n1\n```\n", AssertionError),
    ]:
        page.write_text(content)
        with pytest.raises(error):
            run_page(page, tmp_path, monkeypatch)
    page.write_text("```python\nprint('took 1.5 s, done')\n```\n\n```text\ntook 27 s, ...\n```\n")
    run_page(page, tmp_path, monkeypatch)


def own_text(page):
    """A page without its generated tables."""
    return re.sub(r"<!-- begin.*?<!-- end -->", "", page.read_text(), flags=re.S)


@pytest.mark.parametrize("page", names(sorted((DOCS / "how-to").glob("*.md"))))
def test_how_to_pages_stay_short(page):
    assert len(own_text(ROOT / page).splitlines()) <= 120


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


def test_the_index_links_every_page():
    index = DOCS / "index.md"
    linked = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)\s#]+)\)", index.read_text())}
    stubs = {DOCS / f"{name}.md" for name in ("contributing", "changelog", "benchmarks", "report")}
    assert set(DOCS.rglob("*.md")) - stubs - linked == {index}


# ---------------------------------------------------------------------------------------------------- commands


def commands(text):
    """Command lines of mmlda in code that is no Python: after a prompt, or indented."""
    lines = [
        line
        for kind, code in FENCE.findall(text)
        if kind in ("console", "sh", "bash", "")
        for line in code.splitlines()
    ]
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


@pytest.mark.parametrize(
    "line",
    [
        "$ mmlda trian --data digits",
        "$ mmlda train --dta digits",
        "$ mmlda data get mnist",
        "$ torchrun -m mmlda train --eps 3",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(line):
    (words,) = commands(f"```console\n{line}\n```\n")
    with pytest.raises(Exception):  # noqa: B017 - an AssertionError, or click's own
        parse(words)


def test_there_are_commands_to_check():
    assert sum(len(list(commands(page.read_text()))) for page in GUIDES) > 15


# ---------------------------------------------------------------------------------------------------- messages


def text_of(node):
    """A string of the sources, with a gap where an f-string has a value; a gap for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"


def literals():
    """Every string of the sources, and the messages that `invalid`, `check_choice` and `check_floating` make."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                found.append(text_of(node))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "invalid":
                found.append(f"{text_of(node.args[0])} must be {text_of(node.args[1])}, got \0")
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check_choice":
                found.append(f"{text_of(node.args[0])} must be one of \0, got \0")
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check_floating":
                found.append(f"{text_of(node.args[0])} must be a floating tensor [\0], got \0")
    return found


def said_somewhere(message, strings):
    """Whether one string of the sources has the message, whose `...` stand for anything."""
    parts = [part for part in message.split("...") if part.strip()]
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in parts), re.S)
    return any(pattern.search(text) for text in strings)


@pytest.mark.parametrize("page", names(GUIDES))
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
    assert said_somewhere("eps must be a radius between 0 and 1, the range of the images, got ...", strings)
    assert not said_somewhere("eps must be a happy number, got ...", strings)


# ---------------------------------------------------------------------------------------------------- the paper


def test_every_part_of_the_paper_is_described():
    from mmlda.paper import PARTS

    text = (DOCS / "how-to" / "reproduce-the-paper.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.M)) == {*PARTS, "all"}


def test_the_readme_and_all_pages_together_are_short():
    assert len((ROOT / "README.md").read_text().split()) <= 800
    assert sum(len(own_text(page).split()) for page in PROSE) <= 25_000
