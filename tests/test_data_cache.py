"""The tokenised corpus on disk: exact, never stale, never partial, safe to race for."""

import json
import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxscale.config.errors import UserError
from jaxscale.data import cache
from jaxscale.data.cache import TokenisedCorpus, choose_dtype, find_cache_dir, open_tokenised
from jaxscale.data.publish import open_or_build, read_if_intact
from jaxscale.data.sources import open_source
from jaxscale.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer


def open_it(kind: str, pattern: str, cache_dir: Path, tokenizer: Tokenizer | None = None) -> TokenisedCorpus:
    source = open_source(kind, (pattern,), "text")
    return open_tokenised(source, source.hash_content(), tokenizer or ByteTokenizer(), cache_dir)


def documents_of(corpus: TokenisedCorpus) -> list[list[int]]:
    return [part.tolist() for part in np.split(corpus.tokens, corpus.offsets[1:-1])]


def write_texts(folder: Path, *texts: str) -> str:
    folder.mkdir(exist_ok=True)
    for index, text in enumerate(texts):
        (folder / f"{index:04}.txt").write_text(text)
    return f"{folder}/*.txt"


def test_each_document_gets_one_end_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = write_texts(tmp_path / "text", "ab", "", "c", "def")
    monkeypatch.setattr(cache, "_BATCH_DOCUMENTS", 2)
    corpus = open_it("text", pattern, tmp_path)
    assert documents_of(corpus) == [[97, 98, 256], [99, 256], [100, 101, 102, 256]]
    assert (corpus.tokens.dtype, corpus.offsets.dtype) == (np.uint16, np.int64)


@pytest.mark.parametrize("chunk", [1, 2, 3, 1000])
def test_token_files_split_at_end_tokens_wherever_chunks_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(cache, "_CHUNK_TOKENS", chunk)
    np.save(tmp_path / "a.npy", np.array([1, 2, 9, 3, 9, 9, 4, 5], np.int64))
    np.save(tmp_path / "b.npy", np.array([6, 9], np.uint8))
    np.save(tmp_path / "c.npy", np.array([], np.int32))
    corpus = open_it("tokens", f"{tmp_path}/*.npy", tmp_path / "ended", IdTokenizer(10, 9))
    assert documents_of(corpus) == [[1, 2, 9], [3, 9], [9], [4, 5, 9], [6, 9]]
    corpus = open_it("tokens", f"{tmp_path}/*.npy", tmp_path / "endless", IdTokenizer(10, None))
    assert documents_of(corpus) == [[1, 2, 9, 3, 9, 9, 4, 5], [6, 9]]


@pytest.mark.parametrize(("bad", "dtype"), [(1000, np.int32), (-1, np.int32), (2**63, np.uint64)])
def test_an_id_outside_the_vocabulary_names_file_offset_and_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int, dtype: type
) -> None:
    monkeypatch.setattr(cache, "_CHUNK_TOKENS", 4)
    np.save(tmp_path / "a.npy", np.array([999, 0, 1, 2, 3, 4, bad, 5], dtype))
    with pytest.raises(UserError, match=rf"a\.npy: token id {bad} at offset 6 is outside .*\[0, 1000\)"):
        open_it("tokens", f"{tmp_path}/a.npy", tmp_path / "cache", IdTokenizer(1000, None))
    assert not list((tmp_path / "cache").glob("*/*"))  # nothing half-made stays


def test_large_vocabulary_survives_the_round_trip(tmp_path: Path) -> None:
    ids = np.arange(65_530, 70_000)
    np.save(tmp_path / "a.npy", ids)
    corpus = open_it("tokens", f"{tmp_path}/a.npy", tmp_path / "cache", IdTokenizer(70_000, None))
    np.testing.assert_array_equal(corpus.tokens, ids)
    assert (choose_dtype(65_536), choose_dtype(65_537)) == (np.dtype(np.uint16), np.dtype(np.uint32))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path / "text", "", "")
    with pytest.raises(UserError, match=r"the corpus is empty: 2 files, .*0000\.txt, hold 0 tokens"):
        open_it("text", pattern, tmp_path / "cache")


def test_the_second_opening_does_not_tokenise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = write_texts(tmp_path / "text", "abc")
    before = documents_of(open_it("text", pattern, tmp_path / "cache"))
    monkeypatch.setattr(ByteTokenizer, "encode_batch", lambda *_: pytest.fail("tokenised again"))
    assert documents_of(open_it("text", pattern, tmp_path / "cache")) == before


def test_a_changed_text_or_tokenizer_never_meets_the_old_tokens(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path / "text", "abc")
    open_it("text", pattern, tmp_path / "cache")
    write_texts(tmp_path / "text", "abd")  # same size
    assert documents_of(open_it("text", pattern, tmp_path / "cache")) == [[97, 98, 100, 256]]
    np.save(tmp_path / "a.npy", np.array([1, 2, 3]))
    for end in (2, 1):
        corpus = open_it("tokens", f"{tmp_path}/a.npy", tmp_path / "cache", IdTokenizer(4, end))
        assert documents_of(corpus)[0] == list(range(1, end + 1))


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = write_texts(tmp_path / "text", "abc")
    encode = ByteTokenizer.encode_batch

    def change_while_encoding(self: ByteTokenizer, texts: list[str]) -> list[np.ndarray]:
        write_texts(tmp_path / "text", "abc and more")
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", change_while_encoding)
    with pytest.raises(UserError, match="a file changed while it was being tokenised"):
        open_it("text", pattern, tmp_path / "cache")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink])
@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "meta.json"])
def test_a_damaged_folder_is_built_anew(tmp_path: Path, name: str, damage) -> None:
    pattern = write_texts(tmp_path / "text", "abc", "d")
    whole = documents_of(open_it("text", pattern, tmp_path / "cache"))
    [damaged] = tmp_path.glob(f"cache/corpora/*/{name}")
    damage(damaged)
    assert read_if_intact(damaged.parent) is None
    assert documents_of(open_it("text", pattern, tmp_path / "cache")) == whole
    assert [path.name for path in damaged.parent.parent.iterdir()] == [damaged.parent.name]


def test_truncation_of_a_large_file_is_seen_without_reading_it_whole(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path / "text", "x" * 3_000_000)
    open_it("text", pattern, tmp_path / "cache")
    [tokens] = tmp_path.glob("cache/corpora/*/tokens.bin")
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))  # never written back
    assert read_if_intact(tokens.parent) is None


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> dict:
        (folder / "part").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_or_build(tmp_path / "cache" / "key", interrupted)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_slower_of_two_builders_uses_the_folder_of_the_faster(tmp_path: Path) -> None:
    folder = tmp_path / "key"

    def fast(temporary: Path) -> dict:
        (temporary / "data").write_text("fast")
        return {"by": "fast"}

    def slow(temporary: Path) -> dict:
        (temporary / "data").write_text("slow")
        assert open_or_build(folder, fast) == {"by": "fast"}  # finishes while we build
        return {"by": "slow"}

    assert open_or_build(folder, slow) == {"by": "fast"}
    assert (folder / "data").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [folder]


def race(pattern: str, cache_dir: str, barrier, results) -> None:
    barrier.wait()
    results.put([len(document) for document in documents_of(open_it("text", pattern, Path(cache_dir)))])


def test_two_racing_processes_both_end_with_the_corpus(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path / "text", *["some text " * 50] * 40)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    racers = [
        context.Process(target=race, args=(pattern, f"{tmp_path}/cache", barrier, results)) for _ in "ab"
    ]
    for racer in racers:
        racer.start()
    found = [results.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0]
    assert found[0] == found[1] == [501] * 40
    assert len(list((tmp_path / "cache" / "corpora").iterdir())) == 1


def test_cache_folder_is_configured_or_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_cache_dir(str(tmp_path)) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert find_cache_dir(None) == tmp_path / "xdg" / "jaxscale"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_cache_dir(None) == tmp_path / ".cache" / "jaxscale"


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path / "text", "abc")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write .*set data\.cache_dir to another folder"):
        open_it("text", pattern, tmp_path / "file")


def test_description_tells_what_the_folder_holds(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path / "text", "abc")
    open_it("text", pattern, tmp_path / "cache")
    [meta] = tmp_path.glob("cache/corpora/*/meta.json")
    description = json.loads(meta.read_text())["description"]
    assert (description["tokens"], description["documents"], description["dtype"]) == (4, 1, "uint16")
    shutil.copytree(meta.parent, tmp_path / "moved")
    assert read_if_intact(tmp_path / "moved") == description
