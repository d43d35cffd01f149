"""Writes the tables of docs/errors.md anew from the codes' own descriptions. Run it after changing codes.toml."""

from pathlib import Path

from holdfast.observability.codes import fill_tables

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"

if __name__ == "__main__":
    PAGE.write_text(fill_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
