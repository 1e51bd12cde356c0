"""docs/layer1.md's tables are what its program makes, and its commands are ones that exist."""

from __future__ import annotations

import re

import pytest

from benchmarks import layer1_tables as tables

PAGE = tables.PAGE.read_text(encoding="utf-8")
BY_HAND = "python -m benchmarks.layer1_tables --write makes them anew"


@pytest.mark.parametrize("name", [name for name in tables.PARTS if name != "barriers"])
def test_tables_are_those_of_the_result_files(name: str) -> None:
    assert tables.part_of(PAGE, name) == tables.PARTS[name](), BY_HAND


@pytest.mark.ptx
def test_barriers_are_those_of_the_compiler() -> None:
    assert tables.part_of(PAGE, "barriers") == tables.barriers(), BY_HAND


def test_a_part_is_put_between_its_marks_and_nothing_else_changes() -> None:
    page = "a\n<!-- x -->\nold\n\nlines\n<!-- /x -->\nb <!-- y -->\n<!-- /y -->\n"
    assert tables.part_of(page, "x") == "old\n\nlines" and tables.part_of(page, "y") == ""
    assert tables.filled(page, "x", "new") == "a\n<!-- x -->\nnew\n<!-- /x -->\nb <!-- y -->\n<!-- /y -->\n"
    with pytest.raises(KeyError, match="no part z"):
        tables.filled(page, "z", "")


@pytest.mark.ptx
def test_kernels_that_the_page_shows_exist() -> None:
    names = set(re.findall(r"show_ptx (\w+_\w+)", PAGE))
    assert len(names) >= 3
    from l1_kernels.show_ptx import find_kernel

    for name in names:
        find_kernel(name)
    with pytest.raises(KeyError, match="coalesced_fp16"):
        find_kernel("coalesced_fp8")


@pytest.mark.ptx
def test_what_the_page_says_that_the_compiler_makes(capsys: pytest.CaptureFixture[str]) -> None:
    from l1_kernels.show_ptx import main

    assert main(["wide_fp16_add", "--count", "no_allocate", "--count", ".local"]) == 0  # registers: other ptxas, other numbers
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line in PAGE for line in lines)
    assert main(["wide_fp16_4_rows", "--count", "no_allocate"]) == 0
    assert capsys.readouterr().out.split()[1] == "24"
    assert main(["no_such_kernel"]) == 2
