"""Reads a page of the report back: a tree of its elements, and what they say."""

import json
import re
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Tree(HTMLParser):
    """A page as nodes: name, attributes, children (nodes and texts)."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.root = {"name": "", "at": {}, "in": []}
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert len(self.open) == 1, f"not closed: {[node['name'] for node in self.open[1:]]}"

    def handle_starttag(self, name, at):
        node = {"name": name, "at": dict(at), "in": []}
        self.open[-1]["in"].append(node)
        if name not in VOID:
            self.open.append(node)

    def handle_startendtag(self, name, at):
        self.open[-1]["in"].append({"name": name, "at": dict(at), "in": []})

    def handle_endtag(self, name):
        assert self.open[-1]["name"] == name, f"</{name}> closes <{self.open[-1]['name']}>"
        self.open.pop()

    def handle_data(self, text):
        self.open[-1]["in"].append(text)

    def all(self, name=None, node=None, **at):
        """The nodes of a name with these attributes; a class is one of its classes."""
        for child in (node or self.root)["in"]:
            if isinstance(child, str):
                continue
            classes = (child["at"].get("class") or "").split()
            same = all((v in classes) if k == "class_" else child["at"].get(k) == v for k, v in at.items())
            if (name is None or child["name"] == name) and same:
                yield child
            yield from self.all(name, child, **at)

    def one(self, name=None, node=None, **at):
        return next(self.all(name, node, **at))


def text(node):
    """The text in a node, blanks as one; drawings and scripts have none."""
    if isinstance(node, str):
        return node
    if node["name"] in ("svg", "script", "style"):
        return ""
    gap = " " if node["name"] in ("td", "th", "dd", "dt", "li", "p", "span", "button", "div") else ""
    return re.sub(r"\s+", " ", gap + "".join(text(child) for child in node["in"]) + gap)


def said(node):
    return text(node).strip()


def data_of(page):
    return json.loads("".join(page.one("script", id="data")["in"]))
