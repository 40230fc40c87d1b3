"""HTML as a tree of elements: strictly read, searched with plain selectors.

What a browser would mend is an error here: an element that is not closed, an end without a
beginning, an id that stands twice. Nothing of a page is run; scripts and event attributes are
errors too. Limits on size and depth hold before and after events.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from html.parser import HTMLParser

MOST_DEPTH = 32
MOST_ELEMENTS = 200

_VOID = "br hr img input link meta"
_INLINE = "span a button label strong em b i small code output select option"
_BLOCKS = (
    "html head title style body header main footer nav section article aside div p h1 h2 h3 h4 h5 "
    "h6 ul ol li dl dt dd form textarea fieldset legend table caption thead tbody tfoot tr td th "
    "pre blockquote figure figcaption"
)
VOID = frozenset(_VOID.split())
INLINE = frozenset(_INLINE.split())
"""Elements whose text goes on in the same line; all others stand apart."""
KNOWN = VOID | INLINE | frozenset(_BLOCKS.split())
UNSEEN = frozenset({"head", "title", "style"})
TEXT_ONLY = frozenset({"title", "textarea"})
FIELDS = frozenset({"input", "textarea"})

_SPACE = re.compile(r"\s+")
_NO_DISPLAY = re.compile(r"(?:^|;)\s*(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.IGNORECASE)
_PART = re.compile(
    r"(?P<tag>[a-z][a-z0-9]*)?"
    r"(?P<rest>(?:#[\w-]+|\.[\w-]+|\[[a-z-]+(?:=(?:\"[^\"\]]*\"|'[^'\]]*'|[\w-]+))?\])*)"
)
_PIECE = re.compile(r"[#.][\w-]+|\[[^\]]+\]")
# Where readers of HTML differ, a page is an error.
_ODD_COMMENT = re.compile(r"<!--?>|<!--->|--!>")
_DECLARATION = re.compile(r"<!(?!doctype)", re.IGNORECASE)
_TAG = re.compile(r"<[A-Za-z/!?]")
_ID = re.compile(r"[\w-]{1,64}")


class BuildError(ValueError):
    """A project cannot be built; the message says why."""


class SelectorError(ValueError):
    """A text is no selector."""


@dataclass(eq=False, slots=True)
class Element:
    """A node of the page; the text of a node is among its children."""

    tag: str
    attrs: dict[str, str] = field(default_factory=dict[str, str])
    parent: Element | None = None
    children: list[Element | str] = field(default_factory=list["Element | str"])

    @property
    def classes(self) -> frozenset[str]:
        """Names in the attribute ``class``."""
        return frozenset(self.attrs.get("class", "").split())

    @property
    def hides(self) -> bool:
        """Whether this element says that it is not to be seen."""
        return (
            self.tag in UNSEEN
            or "hidden" in self.attrs
            or "hidden" in self.classes
            or (self.tag == "input" and self.attrs.get("type", "").lower() == "hidden")
            or bool(_NO_DISPLAY.search(self.attrs.get("style", "")))
        )

    def lineage(self) -> Iterator[Element]:
        """This element and those around it, inside out."""
        node: Element | None = self
        while node is not None:
            yield node
            node = node.parent

    def is_visible(self) -> bool:
        """Whether neither it nor anything around it is hidden."""
        return not any(node.hides for node in self.lineage())

    def inside(self) -> Iterator[Element]:
        """All elements inside, in the order of the page."""
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child.inside()

    def text(self) -> str:
        """What can be read in it, with single spaces."""
        return plain("".join(self._texts()))

    def _texts(self) -> Iterator[str]:
        for child in self.children:
            if isinstance(child, str):
                yield child
            elif child.tag == "br":
                yield " "
            elif not child.hides and child.tag not in FIELDS:
                between = "" if child.tag in INLINE else " "
                yield between
                yield from child._texts()
                yield between

    def copy(self, parent: Element | None = None) -> Element:
        """A tree of its own."""
        twin = Element(self.tag, dict(self.attrs), parent)
        twin.children = [c if isinstance(c, str) else c.copy(twin) for c in self.children]
        return twin


def plain(text: str) -> str:
    """A text in one line and one Unicode form.

    Example:
        >>> plain("  two\\n words ")
        'two words'
    """
    return _SPACE.sub(" ", unicodedata.normalize("NFC", text)).strip()


@dataclass(frozen=True, slots=True)
class Selector:
    """Elements by tag, id, class and attribute, and by what they are inside of.

    Example:
        >>> Selector.parse("ul#items li.new").text
        'ul#items li.new'
    """

    text: str
    parts: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Read a selector.

        Raises:
            SelectorError: It is none.
        """
        return _selector(text)

    def matches(self, element: Element) -> bool:
        """Whether an element is meant."""
        *outer, own = self.parts
        if not _fits(element, own):
            return False
        around = element.parent
        for part in reversed(outer):
            while around is not None and not _fits(around, part):
                around = around.parent
            if around is None:
                return False
            around = around.parent
        return True

    def find(self, root: Element) -> list[Element]:
        """All elements of a page that are meant, in its order."""
        return [element for element in root.inside() if self.matches(element)]


@lru_cache(maxsize=512)
def _selector(text: str) -> Selector:
    words = text.split()
    if not 1 <= len(words) <= 4 or len(text) > 120:
        raise SelectorError(f"{text[:40]!r} is no selector")
    parts: list[tuple[str, tuple[str, ...]]] = []
    for word in words:
        found = _PART.fullmatch(word)
        if found is None:
            raise SelectorError(f"{text[:40]!r} is no selector")
        parts.append((found["tag"] or "", tuple(_PIECE.findall(found["rest"]))))
    return Selector(" ".join(words), tuple(parts))


def _fits(element: Element, part: tuple[str, tuple[str, ...]]) -> bool:
    tag, pieces = part
    return (not tag or element.tag == tag) and all(_has(element, piece) for piece in pieces)


def _has(element: Element, piece: str) -> bool:
    if piece[0] == "#":
        return element.attrs.get("id") == piece[1:]
    if piece[0] == ".":
        return piece[1:] in element.classes
    name, equals, value = piece[1:-1].partition("=")
    if not equals:
        return name in element.attrs
    return element.attrs.get(name) == value.strip("\"'")


def parse_page(text: str) -> Element:
    """The tree of a page, below an element without a tag.

    Raises:
        BuildError: It is none that can be built.
    """
    if _ODD_COMMENT.search(text):
        raise BuildError("a comment begins with <!-- and ends with -->")
    bare = _without_comments(text)
    if _DECLARATION.search(bare):
        raise BuildError("<!...> is not allowed")
    if _TAG.search(bare, bare.rfind(">") + 1):
        raise BuildError("the page ends inside a tag")
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return reader.finish()


def _without_comments(text: str) -> str:
    parts: list[str] = []
    at = 0
    while (begin := text.find("<!--", at)) >= 0:
        end = text.find("-->", begin + 4)
        if end < 0:
            raise BuildError("a comment is never closed")
        parts.append(text[at:begin])
        at = end + 3
    return "".join([*parts, text[at:]])


class _Reader(HTMLParser):
    """Builds the tree; raises ``BuildError`` at the first thing that is wrong."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("")
        self._open: list[tuple[Element, int]] = [(self.root, 0)]
        self._ids: set[str] = set()
        self._count = 0

    @property
    def _here(self) -> Element:
        return self._open[-1][0]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin an element."""
        line = self.getpos()[0]
        if tag not in KNOWN:
            raise BuildError(f"line {line}: <{_short(tag)}> is not allowed")
        if self._here.tag in TEXT_ONLY:
            raise BuildError(f"line {line}: <{self._here.tag}> holds text only")
        element = Element(tag, self._attributes(attrs, line), self._here)
        self._count += 1
        if self._count > MOST_ELEMENTS or len(self._open) > MOST_DEPTH:
            raise BuildError(
                f"line {line}: a page has at most {MOST_ELEMENTS} elements, {MOST_DEPTH} deep"
            )
        self._here.children.append(element)
        if tag not in VOID:
            self._open.append((element, line))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """``<br/>``; for an element that has an end it is the beginning only, as in HTML."""
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        """End an element."""
        line = self.getpos()[0]
        if self._here.tag != tag:
            found = f"<{self._here.tag}> of line {self._open[-1][1]} is open"
            within = found if self._here.tag else "nothing is open"
            raise BuildError(f"line {line}: </{_short(tag)}> where {within}")
        self._open.pop()

    def handle_data(self, data: str) -> None:
        """Text."""
        if "<" in data and self._here.tag in TEXT_ONLY:
            raise BuildError(f"line {self.getpos()[0]}: <{self._here.tag}> holds text only")
        self._here.children.append(data)

    def handle_pi(self, data: str) -> None:
        """``<?php``."""
        raise BuildError(f"line {self.getpos()[0]}: <?...> is not allowed")

    def finish(self) -> Element:
        """The tree, if everything was closed."""
        if len(self._open) > 1:
            element, line = self._open[-1]
            raise BuildError(f"<{element.tag}> of line {line} is never closed")
        return self.root

    def _attributes(self, attrs: list[tuple[str, str | None]], line: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, given in attrs:
            value = given or ""
            if name in found:
                raise BuildError(f"line {line}: the attribute {_short(name)} stands twice")
            script = re.sub(r"[\s\x00]", "", value).lower().startswith("javascript:")
            if name.startswith("on") or script:
                raise BuildError(f"line {line}: scripts are not run here; use app.json")
            if name == "id":
                self._check_id(value, line)
            found[name] = value
        return found

    def _check_id(self, value: str, line: int) -> None:
        if not _ID.fullmatch(value):
            raise BuildError(f"line {line}: {_short(value)!r} is no id")
        if value in self._ids:
            raise BuildError(f"line {line}: the id {value} stands twice")
        self._ids.add(value)


def _short(text: str) -> str:
    return plain(text)[:24]
