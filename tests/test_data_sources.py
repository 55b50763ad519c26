"""Files to documents: what is read, in which order, and what is refused with which words."""

import json
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxscale.config.errors import UserError
from jaxscale.data.sources import open_source


def write_jsonl(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def texts_of(kind: str, *paths: str, field: str = "text") -> list[str]:
    return [document.text for document in open_source(kind, paths, field).read_documents()]


def read_all(kind: str, *paths: str, field: str = "text") -> None:
    source = open_source(kind, paths, field)
    if kind == "tokens":
        list(source.read_token_files())
    else:
        list(source.read_documents())


def test_stdlib_is_sorted_and_leaves_out_tests_and_installed_packages() -> None:
    source = open_source("python-stdlib", (), "text")
    assert list(source.names) == sorted(source.names)
    assert {"argparse.py", "json/decoder.py"} <= set(source.names)
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    assert not [name for name in source.names if skipped & set(name.split("/")[:-1])]
    first = next(source.read_documents())
    root = Path(sysconfig.get_paths()["stdlib"])
    assert first.text.encode() == Path(root, first.place).read_bytes()


def test_text_files_are_whole_documents_in_sorted_order_and_count_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"two\r\nlines\n")
    (tmp_path / "a.txt").write_bytes(b"bad \xff byte")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "sub" / "c.txt").write_text("deep")
    found = texts_of("text", f"{tmp_path}/**/*.txt", f"{tmp_path}/b.txt")
    assert found == ["bad � byte", "two\r\nlines\n", "deep"]


def test_jsonl_and_parquet_give_the_named_field_in_order(tmp_path: Path) -> None:
    jsonl = write_jsonl(tmp_path / "a.jsonl", {"body": "one"}, {"body": ""}, {"body": "dré", "n": 1})
    assert texts_of("jsonl", jsonl, field="body") == ["one", "dré"]
    table = pyarrow.table({"body": ["x", "y\n", ""], "n": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts_of("parquet", f"{tmp_path}/*.parquet", field="body") == ["x", "y\n"]


def test_content_hash_follows_names_and_bytes_but_not_the_folder(tmp_path: Path) -> None:
    hashes = []
    for folder, name, text in [("p", "a", "x"), ("q", "a", "x"), ("r", "b", "x"), ("s", "a", "y")]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
        hashes.append(open_source("text", (f"{tmp_path}/{folder}/*",), "text").hash_content())
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"text": "a"}\n{"txt": "b"}\n', [":2", "no field 'text'", "txt", "data.field"]),
        ('{"text": "a"}\n\n{"text": \n', [":3", "not JSON"]),
        ('{"text": 7}\n', [":1", "holds int, not text"]),
        ('{"text": null}\n', [":1", "holds NoneType, not text"]),
        ('["a"]\n', [":1", "list found", "one object a line"]),
        ('{"text": "\\ud800"}\n', [":1", "surrogate"]),
    ],
)
def test_a_bad_jsonl_line_is_named_with_file_and_line(tmp_path: Path, lines: str, words: list[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(lines)
    with pytest.raises(UserError) as error:
        read_all("jsonl", str(path))
    assert [word for word in [str(path), *words] if word not in str(error.value)] == []


def test_a_jsonl_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"bad.jsonl:1: not JSON in UTF-8"):
        read_all("jsonl", str(path))


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x", None], "n": [1, 2]}), path)
    with pytest.raises(UserError, match=r"no column 'text' \(columns: body, n\).*data.field"):
        read_all("parquet", str(path))
    with pytest.raises(UserError, match=r"column 'n' holds int64, not text"):
        read_all("parquet", str(path), field="n")
    with pytest.raises(UserError, match=r"a.parquet, row 2: column 'body' is null"):
        read_all("parquet", str(path), field="body")
    path.write_bytes(b"not parquet at all")
    with pytest.raises(UserError, match="is not a Parquet file"):
        read_all("parquet", str(path))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((2, 3), np.int32), r"int32 of shape \(2, 3\).*one 1-D array of integers"),
        (np.zeros(3, np.float32), "float32.*1-D array of integers"),
        (np.array([{}], dtype=object), "not a .npy file of integers"),
    ],
)
def test_a_token_file_of_another_kind_is_named(tmp_path: Path, array: np.ndarray, words: str) -> None:
    np.save(tmp_path / "bad.npy", array)
    with pytest.raises(UserError, match=r"bad\.npy.*" + words):
        read_all("tokens", f"{tmp_path}/*.npy")


def test_paths_that_name_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.source text needs files: set data\.paths"):
        open_source("text", (), "text")
    with pytest.raises(UserError, match=r"data\.mixture\[1\]\.paths: there is no file .*missing\.txt"):
        open_source("text", (f"{tmp_path}/missing.txt",), "text", "data.mixture[1]")
    with pytest.raises(UserError, match=r"data\.paths: the pattern .*\*\.txt matches no file"):
        open_source("text", (f"{tmp_path}/*.txt",), "text")
    with pytest.raises(UserError, match=r"is a folder; name files or a pattern"):
        open_source("text", (str(tmp_path),), "text")
    with pytest.raises(UserError, match=r"python-stdlib, which reads no paths"):
        open_source("python-stdlib", ("a.txt",), "text")
