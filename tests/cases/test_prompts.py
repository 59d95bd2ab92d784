"""Awkward prompt files: each row of expect.json states an outcome and facts, each fact is a check below.

FLOWRL_CASES names another folder of the same layout (expect.json, prompts/, tables/, geneval/, ocr/).
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import subprocess
import sys
import tracemalloc
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from flowrl import prompt_files
from flowrl.prompt_files import PromptFile, PromptFileError, read_prompts

CASES = Path(os.environ.get("FLOWRL_CASES", Path(__file__).parents[1] / "data" / "cases"))
KINDS = ("prompts", "geneval", "ocr", "tables")
ROWS = [
    row
    for row in json.loads((CASES / "expect.json").read_bytes())["files"]
    if row["kind"] in KINDS and not row["odd"].startswith("not an input")
]
# what a geneval or OCR file is refused for is a reward's business: here it must load
OWN_REJECTS = ("prompts", "tables")


@dataclass(frozen=True)
class Case:
    """A file, what reading it gave (strictly, then with bad rows skipped), and what expect.json says of it."""

    row: dict[str, Any]

    @property
    def path(self) -> Path:
        path = CASES / self.row["file"]
        return path.parent if self.row["facts"].get("parent_is_dir") else path

    @cached_property
    def raw(self) -> bytes:
        return (CASES / self.row["file"]).read_bytes()

    def _read(self, **options: bool) -> PromptFile | PromptFileError:
        try:
            return read_prompts(self.path, **options)
        except PromptFileError as error:
            return error

    @cached_property
    def strict(self) -> PromptFile | PromptFileError:
        return self._read()

    @cached_property
    def lenient(self) -> PromptFile | PromptFileError:
        return self._read(skip_bad=True)

    @property
    def files(self) -> list[PromptFile]:
        return [result for result in (self.strict, self.lenient) if isinstance(result, PromptFile)]

    @property
    def texts(self) -> list[str]:
        assert isinstance(self.strict, PromptFile), self.strict
        return [prompt.text for prompt in self.strict.prompts]

    @property
    def error(self) -> str:
        assert isinstance(self.strict, PromptFileError), "the file was read but must be refused"
        return str(self.strict)

    @property
    def told(self) -> str:
        """All that the user hears, whichever way the file went."""
        return "\n".join(self.strict.notices) if isinstance(self.strict, PromptFile) else self.error

    @property
    def named_lines(self) -> list[int]:
        return [int(n) for n in re.findall(r"^  line (\d+):", self.error, re.MULTILINE)]


def _json_values(case: Case) -> dict[int, Any]:
    """{line: value} of what is JSON in a file of JSON lines, by the plain parser."""
    values = {}
    for number, line in enumerate(case.raw.decode("utf-8-sig").split("\n"), 1):
        try:
            values[number] = json.loads(line)
        except (ValueError, RecursionError):
            continue
    return values


def _counted(expected: int, case: Case) -> None:
    """The stated number of prompts, or none because the file was refused and may be."""
    if isinstance(case.strict, PromptFileError):
        assert case.row["outcome"] in ("reject", "either")
    else:
        assert len(case.texts) == expected


def n_prompts(expected: int, case: Case) -> None:
    if expected:
        assert len(case.texts) == expected
    else:
        assert "no prompts" in case.error


def must_contain_prompt(expected: list[str], case: Case) -> None:
    assert set(expected) <= set(case.texts)


def n_distinct(expected: int, case: Case) -> None:
    assert len(set(case.texts)) == expected
    assert f"{len(case.texts) - expected} row" in case.told
    assert len(read_prompts(case.path, dedupe=True).prompts) == expected


def n_distinct_prompts(expected: int, case: Case) -> None:
    assert len(set(case.texts)) == expected < len(case.texts)
    assert len(read_prompts(case.path, dedupe=True).prompts) == len(case.texts), "other metadata, another prompt"


def longest(expected: int, case: Case) -> None:
    line = 1 + [len(text) for text in case.raw.decode().split("\n")].index(expected)
    assert max(map(len, case.texts)) == expected
    assert f"line {line}: {expected:,} characters" in case.told


def lines_refused(expected: int | list[int], case: Case) -> None:
    wanted = {expected} if isinstance(expected, int) else set(expected)
    assert wanted <= set(case.named_lines)
    assert isinstance(case.lenient, PromptFile)
    assert {bad.number for bad in case.lenient.skipped} == set(case.named_lines)
    assert not wanted & {prompt.id for prompt in case.lenient.prompts}


def bad_rows(expected: list[int], case: Case) -> None:
    assert case.named_lines == expected
    keys = {line: value["id"] for line, value in _json_values(case).items() if "id" in value}
    assert isinstance(case.lenient, PromptFile)
    assert [bad.key for bad in case.lenient.skipped] == [str(keys.get(line, "")) for line in expected]


def nul_lines(expected: list[int] | str, case: Case) -> None:
    assert "NUL" in case.error
    if expected != "some":
        assert isinstance(expected, list)
        lines_refused(expected, case)


def not_utf8_at(expected: int, case: Case) -> None:
    line = 1 + case.raw[:expected].count(b"\n")
    assert f"line {line}: byte {expected} " in case.error and "not UTF-8" in case.error


def decode(expected: tuple[str, int], case: Case) -> None:
    encoding, count = expected
    _counted(count, case)
    if encoding.startswith("utf-16"):
        assert "UTF-16" in case.told
    if isinstance(case.strict, PromptFile):
        assert case.texts == [line.strip() for line in case.raw.decode(encoding).splitlines() if line.strip()]


def gz_error(expected: str, case: Case) -> None:
    if expected == "BadGzipFile":
        assert "not gzip data" in case.told
    else:
        assert "incomplete or damaged" in case.error


def gz_prompts(expected: int, case: Case) -> None:
    _counted(expected, case)
    if isinstance(case.strict, PromptFile):
        assert case.texts == [line.strip() for line in gzip.decompress(case.raw).decode().split("\n") if line.strip()]


def gz_expands(expected: int, case: Case) -> None:
    assert len(case.error) < 10_000
    tracemalloc.start()
    with pytest.raises(PromptFileError):
        read_prompts(case.path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * expected


def json_ok(expected: int, case: Case) -> None:
    """Rows that are JSON: all prompts of a good file; what is used keeps its id and all of its metadata."""
    values = _json_values(case)
    assert len(values) == expected
    for file in case.files:
        assert len(file.prompts) + len(file.skipped) >= expected
        for prompt in file.prompts:
            value = dict(values[prompt.id])
            assert prompt.text == value.pop("prompt").strip()
            assert prompt.key == str(value.pop("id", "")).strip()
            inner = value.pop("metadata", {})
            assert repr(dict(prompt.metadata)) == repr({**value, **inner}), "order, integers, null: all as written"
    if case.row["outcome"].startswith("accept"):
        assert len(case.texts) == expected


def json_whole(expected: int, case: Case) -> None:
    value = json.loads(case.raw)
    assert len(value) == expected
    if isinstance(case.strict, PromptFileError):
        assert len(case.error.splitlines()) <= 2
    elif isinstance(value, dict):
        got = [(prompt.metadata["style"], prompt.text) for prompt in case.strict.prompts]
        assert got == [(style, text) for style, texts in value.items() for text in texts]
    else:
        rows = [{"prompt": item} if isinstance(item, str) else item for item in value]
        got = [{"prompt": prompt.text, **prompt.metadata} for prompt in case.strict.prompts]
        assert got == rows


def dup_key_lines(expected: list[int], case: Case) -> None:
    assert set(expected) <= set(map(int, re.findall(r"line (\d+)", case.told)))


def big(expected: int, case: Case) -> None:
    assert isinstance(case.strict, PromptFile)
    assert any(expected in prompt.metadata.values() for prompt in case.strict.prompts)


def nfc_nfd_pair(expected: list[str], case: Case) -> None:
    composed, decomposed = expected
    assert composed != decomposed and unicodedata.normalize("NFC", decomposed) == composed
    assert {composed, decomposed} <= set(case.texts)


def n_cr(expected: int, case: Case) -> None:
    _counted(expected, case)
    if isinstance(case.strict, PromptFileError):
        assert "carriage return" in case.error


def csv_table(expected: tuple[str, int], case: Case) -> None:
    """Every record is a prompt or named; a file whose header has no prompt column shows what it has."""
    delimiter, records = expected
    header, *rows = csv.reader(case.raw.decode("utf-8-sig").splitlines(keepends=True), delimiter=delimiter)
    assert 1 + len(rows) == records
    if isinstance(case.strict, PromptFileError):
        assert "header" in case.error and header[0][:40] in case.error
        return
    column = [name.lower() in ("prompt", "prompts") for name in header].index(True)
    full = [row for row in rows if row[column].strip()]
    assert case.texts == [row[column].strip() for row in full]
    rest = [dict(zip(header, row, strict=True)) for row in full]
    for metadata, prompt in zip(rest, case.strict.prompts, strict=True):
        assert dict(prompt.metadata) == {name: cell for name, cell in metadata.items() if name != header[column]}
    for number, row in enumerate(rows, 1):
        assert row[column].strip() or f"row {number} " in case.told


def csv_ragged(expected: bool, case: Case) -> None:
    header, *rows = csv.reader(case.raw.decode("utf-8-sig").splitlines(keepends=True))
    ragged = [number for number, row in enumerate(rows, 1) if len(row) != len(header)]
    assert expected and ragged
    assert [int(n) for n in re.findall(r"^  row (\d+) ", case.error, re.MULTILINE)] == ragged


def csv_field_error(expected: bool, case: Case) -> None:
    assert expected and str(csv.field_size_limit()) in case.error
    assert isinstance(case.lenient, PromptFile)
    lengths = [len(line) for line in case.raw.splitlines()]
    long = [number for number, length in enumerate(lengths) if length > csv.field_size_limit()]
    assert [bad.number for bad in case.lenient.skipped] == long
    assert len(case.lenient.prompts) == len(lengths) - 1 - len(long)


def tsv_lines(expected: int, case: Case) -> None:
    assert case.texts == [line.split("\t")[0].strip() for line in case.raw.decode().splitlines()[1:]]
    assert len(case.texts) == expected - 1


def contains_hex(expected: list[str], case: Case) -> None:
    assert all(bytes.fromhex(text) in case.raw for text in expected)
    for raw in map(bytes.fromhex, expected):
        assert raw == b"\r\n" or raw.decode() not in case.told.replace("\n", "")


FACTS: dict[str, Callable[[Any, Case], object]] = {
    "n_prompts": n_prompts,
    "first": lambda text, case: _same(case.texts[0], text),
    "last": lambda text, case: _same(case.texts[-1], text),
    "must_contain_prompt": must_contain_prompt,
    "n_distinct": n_distinct,
    "n_distinct_prompts": n_distinct_prompts,
    "longest": longest,
    "nul_lines": nul_lines,
    "bad_rows": bad_rows,
    "json_bad_lines": lines_refused,
    "json_recursion_line": lines_refused,
    "surrogate_line": lines_refused,
    "not_utf8_line": lines_refused,
    "not_utf8_at": not_utf8_at,
    "decode": decode,
    "gz_error": gz_error,
    "gz_prompts": gz_prompts,
    "gz_expands": gz_expands,
    "json_ok": json_ok,
    "json_whole": json_whole,
    "dup_key_lines": dup_key_lines,
    "big": big,
    "nfc_nfd_pair": nfc_nfd_pair,
    "n_cr": n_cr,
    "csv": csv_table,
    "csv_ragged": csv_ragged,
    "csv_field_error": csv_field_error,
    "tsv_lines": tsv_lines,
    "contains_hex": contains_hex,
    # of the bytes alone: that the file is still the odd one it was made to be
    "size": lambda size, case: _same(len(case.raw), size),
    "startswith_hex": lambda text, case: _same(case.raw[: len(text) // 2].hex(), text),
    "not_contains_hex": lambda texts, case: _same([t for t in texts if bytes.fromhex(t) in case.raw], []),
    "n_splitlines_more_than": lambda n, case: _same(len(case.raw.decode().splitlines()) > n, True),
    "csv_default_rows_fewer_than": lambda n, case: _same(len(list(csv.reader(_text_lines(case)))) < n, True),
    "parent_is_dir": lambda _, case: _same("folder" in case.error, True),
    "sentinel": lambda name, _: _same([*CASES.rglob(f"{name}*"), *Path.cwd().glob(f"{name}*")], []),
}


def _same(got: object, wanted: object) -> None:
    assert got == wanted


def _text_lines(case: Case) -> list[str]:
    return case.raw.decode("utf-8-sig").splitlines(keepends=True)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", params=ROWS, ids=[row["file"] for row in ROWS])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_outcome(case: Case) -> None:
    outcome = case.row["outcome"]
    if outcome == "reject" and case.row["kind"] in OWN_REJECTS:
        assert case.error
    elif outcome.startswith("accept"):
        assert case.texts and case.lenient == case.strict
    if outcome == "accept_warn":
        assert case.told
    if case.row["kind"] not in OWN_REJECTS:
        assert isinstance(case.lenient, PromptFile)


def test_facts(case: Case) -> None:
    for name, value in case.row["facts"].items():
        FACTS[name](value, case)


def test_what_is_said_names_the_file_and_is_safe_to_print(case: Case) -> None:
    if isinstance(case.strict, PromptFileError):
        assert case.path.name in case.error
    assert all(c.isprintable() for c in case.told.replace("\n", "")), "control characters are escaped"


def test_prompts_are_clean_and_apart(case: Case) -> None:
    for file in case.files:
        assert len({prompt.id for prompt in file.prompts}) == len(file.prompts)
        keys = [prompt.key for prompt in file.prompts if prompt.key]
        assert len(set(keys)) == len(keys)
        for prompt in file.prompts:
            assert not prompt.text.startswith("\ufeff") and not set("\r\0\ufffd") & set(prompt.text)
            assert prompt.text == prompt.text.strip() and any(
                unicodedata.category(c)[0] not in "CMZ" for c in prompt.text
            )
            prompt.text.encode()


def test_nothing_in_a_file_is_run(case: Case) -> None:
    assert case.strict and case.lenient
    left = [*Path.cwd().rglob("*"), *CASES.rglob("cases_sentinel_*")]
    assert not left, "the folder of the run was empty and stays so"


def test_the_locale_changes_nothing() -> None:
    rows = [row for row in ROWS if row["kind"] in OWN_REJECTS and row["outcome"].startswith("accept")]
    paths = [str(CASES / row["file"]) for row in rows]
    script = "import sys, json; from flowrl.prompt_files import read_prompts as r; " \
             "print(json.dumps([[p.text for p in r(path).prompts] for path in sys.argv[1:]]))"  # fmt: skip
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(Path(prompt_files.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", script, *paths], env=env, capture_output=True, check=True)
    assert json.loads(done.stdout) == [Case(row).texts for row in rows]


# what no file of the folder shows


def test_a_long_report_is_cut(tmp_path: Path) -> None:
    (tmp_path / "many.jsonl").write_text("{}\n" * 10_000)
    with pytest.raises(PromptFileError) as error:
        read_prompts(tmp_path / "many.jsonl")
    assert "10,000 bad rows" in str(error.value) and str(error.value).endswith("and 9,950 more")


def test_too_many_lines_are_refused_before_they_are_split(tmp_path: Path) -> None:
    (tmp_path / "lines.txt.gz").write_bytes(gzip.compress(b"\n" * 2**24, 1))
    with pytest.raises(PromptFileError, match="1,000,000 lines"):
        read_prompts(tmp_path / "lines.txt.gz")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.jsonl", '{"prompt": "x", "tag": 1, "metadata": {"tag": 2}}', "line 1: 'tag' is both a key and in metadata"),
        ("a.jsonl", '{"prompt": "x", "id": [1]}', "line 1: id is an array, wanted text or an integer"),
        ("a.jsonl", '{"prompt": "x", "n": ' + "9" * 5000 + "}", "line 1: "),
        ("a.jsonl", '[\n{"prompt": "x"},\n{"prompt" "y"}\n]', "file: not JSON: .* .line 3, column 11"),
        ("a.json", '{"prompt": "x"}', "file: the top level is an object, wanted an array of rows"),
        ("a.json", '["x", 3]', "row 2: the row is a number"),
        ("a.csv", 'prompt,id\n"never closed,1\nx,2\n', "row 1 .*unexpected end of data"),
        ("a.csv", "prompt,id\nx,1\ny,1\n", "row 2 .line 3.: id '1' is already the id of row 1"),
        ("a.parquet", "PAR1", "unknown kind of file"),
        ("\x1b[2J.txt", "", r"no prompts in '.*\\x1b\[2J.txt'"),
    ],
    ids=["both", "id", "digits", "broken-array", "object", "number", "open-quote", "same-id", "kind", "name"],
)
def test_refusals(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PromptFileError, match=reason):
        read_prompts(tmp_path / name)


def test_a_bad_byte_in_a_table_costs_its_row_only(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'prompt,id\none,a\n"two\nlines \xff",b\nthree,c\n')
    file = read_prompts(tmp_path / "a.csv", skip_bad=True)
    assert [(prompt.id, prompt.text, prompt.key) for prompt in file.prompts] == [(1, "one", "a"), (3, "three", "c")]
    assert [(bad.number, bad.place) for bad in file.skipped] == [(2, "row 2 (line 4)")]
