"""docs/format.md describes what is written: every file name, every field, every reason, and nothing that is not."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from evalkit.ground import layout, schema
from evalkit.ground.errors import REASONS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "format.md").read_text()
STRUCTS = [kind for kind in vars(schema).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_field_is_described(kind: type[msgspec.Struct]) -> None:
    words = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`[^`]*`|```[^`]*```", TEXT))))
    assert [field for field in kind.__struct_fields__ if field not in words] == []


def test_every_name_of_the_layout_is_described() -> None:
    source = Path(layout.__file__).read_text()
    names = set(re.findall(r'"(\.?[a-z]+(?:\.[a-z]+)?)"', source)) - {"eval"}
    assert sorted(name for name in names if name not in TEXT) == []


def documented_reasons() -> list[str]:
    table = TEXT.split("### Reasons of a skip")[1].split("###")[0]
    return re.findall(r"^\| `([a-z_]+)`", table, re.MULTILINE)


def test_documented_reasons_are_all_reasons() -> None:
    assert set(documented_reasons()) == set(REASONS)


@pytest.mark.parametrize("reason", documented_reasons())
def test_every_reason_is_produced_by_a_test(reason: str) -> None:
    tests = [path.read_text() for name in ("cli", "crash", "vllm") for path in (ROOT / "tests" / name).glob("*.py")]
    assert any(f'"{reason}"' in text or f"skipped {reason}" in text for text in tests)
