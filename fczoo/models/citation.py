"""BibTeX of methods, from what they state of their papers, and of fczoo."""

import re
from collections.abc import Iterable

from fczoo import __version__
from fczoo.core.method import Method
from fczoo.core.registry import METHODS

ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
YEAR = re.compile(r"\b(19[3-9]\d|20\d\d)\b(?!\.)")
AUTHORS = re.compile(r"(?:^|: )([A-Z][\w'-]+(?: et al\.| and [A-Z][\w'-]+)), ")
TITLE = re.compile('"([^"]+)"')
JOURNALS = ("PNAS", "TPAMI")
PLACE = re.compile(r"\b([A-Z][\w-]*(?: [\w-]+)?) (?:19|20)\d\d\b")

FCZOO = f"""@software{{fczoo,
  title = {{fczoo}},
  author = {{{{The fczoo contributors}}}},
  version = {{{__version__}}},
  license = {{Apache-2.0}},
  abstract = {{A benchmark zoo for Federated Class-Incremental Learning on pre-trained vision transformers}}
}}"""
"""The entry of CITATION.cff."""


def bibtex(methods: Iterable[str]) -> str:
    """Return BibTeX entries of methods and of fczoo.

    An entry has what the method states of its paper: authors, title, venue, year and number at
    arXiv, as far as it names them; without a title, the whole statement as a note.

    Args:
        methods: Registered names.

    Raises:
        FczooError: A name is unknown.
    """
    entries = [entry for name in methods for entry in method_entries(METHODS.get(name))]
    return "\n\n".join([*dict.fromkeys(entries), FCZOO])


def method_entries(method: type[Method]) -> list[str]:
    """Return the BibTeX entries of one method, one for each source that has a year or a number.

    Args:
        method: Class of the method.
    """
    sources = [part.strip() for part in method.paper.split(";")]
    dated = [source for source in sources if ARXIV.search(source) or YEAR.search(source)]
    return [
        _entry(method, source, number)
        for number, source in enumerate(dated or [method.paper or method.name], 1)
    ]


def _entry(method: type[Method], source: str, number: int) -> str:
    fields: dict[str, str] = {}
    if authors := AUTHORS.search(source):
        fields["author"] = authors[1].replace(" et al.", " and others")
    if title := TITLE.search(source):
        fields["title"] = f"{{{title[1]}}}"
    place, year, paper = PLACE.search(source), YEAR.search(source), ARXIV.search(source)
    is_published = bool(title and place)
    kind = "misc"
    if place and is_published:
        kind = "article" if place[1] in JOURNALS else "inproceedings"
        fields["journal" if kind == "article" else "booktitle"] = place[1]
    elif place:
        fields["howpublished"] = place[1]
    if year:
        fields["year"] = year[1]
    if paper:
        fields |= {"eprint": paper[1], "archiveprefix": "arXiv"}
        fields.setdefault("year", f"20{paper[1][:2]}")  # a number begins with year and month
    if not title:
        fields["note"] = source
    key = method.name if number == 1 else f"{method.name}-{number}"
    lines = ",\n".join(f"  {name} = {{{_escape(value)}}}" for name, value in fields.items())
    return f"@{kind}{{{key},\n{lines}\n}}"


def _escape(text: str) -> str:
    """Escape characters that LaTeX would not print."""
    return re.sub(r"([&%#_])", r"\\\1", text)
