"""A Chinese page says what its English original says: the same commands, names, links, headings, tables and lists."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

from benchmarks.support_tables import BEGIN, END

REPOSITORY = Path(__file__).parents[2]
CHINESE = [path for folder in (REPOSITORY, REPOSITORY / "docs") for path in sorted(folder.glob("*.zh-CN.md"))]


class Page(NamedTuple):
    """What does not depend on the language of a page."""

    code: list[str]  # blocks, without their comments
    names: set[str]  # in backticks
    links: set[Path | str]  # files without anchors, and addresses
    shape: list[str]  # tags of headings, table rows and list items


def original(path: Path) -> Path:
    return path.with_name(path.name.replace(".zh-CN.md", ".md"))


def read(path: Path) -> Page:
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    text = before + rest.partition(END)[2]  # printed tables are in the English page only
    blocks = MarkdownIt().enable("table").parse(text)
    inline = [part for block in blocks for part in block.children or ()]
    hrefs = [str(part.attrs["href"]).partition("#")[0] for part in inline if part.type == "link_open"]
    return Page(
        code=[re.sub(r" +# .*", "", block.content) for block in blocks if block.type in ("fence", "code_block")],
        names={part.content for part in inline if part.type == "code_inline"},
        links={href if ":" in href else (path.parent / href).resolve() for href in hrefs},
        shape=[block.tag for block in blocks if block.type in ("heading_open", "tr_open", "list_item_open")],
    )


def test_pages_in_chinese() -> None:
    assert [path.name for path in CHINESE] == [
        "README.zh-CN.md",
        "data.zh-CN.md",
        "distillation.zh-CN.md",
        "methods.zh-CN.md",
        "migration.zh-CN.md",
        "policy.zh-CN.md",
        "preferences.zh-CN.md",
        "strategies.zh-CN.md",
    ]


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda path: path.name)
def test_a_chinese_page_is_in_step_with_its_original(chinese: Path) -> None:
    english, page = read(original(chinese)), read(chinese)
    assert page.code == english.code
    assert page.names == english.names
    assert page.shape == english.shape
    in_chinese = {original(path): path for path in CHINESE if path != chinese} | {chinese: original(chinese)}
    assert page.links == {in_chinese.get(link, link) if isinstance(link, Path) else link for link in english.links}


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda path: path.name)
def test_files_that_pages_link_to_exist(chinese: Path) -> None:
    links = read(chinese).links | read(original(chinese)).links
    assert [link for link in links if isinstance(link, Path) and not link.exists()] == []


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda path: path.name)
def test_each_page_links_to_the_other_in_its_first_line(chinese: Path) -> None:
    for path, other in ((chinese, original(chinese)), (original(chinese), chinese)):
        assert re.match(rf"# .+\n\n\[.+\]\({re.escape(other.name)}\)\n", path.read_text(encoding="utf-8"))
