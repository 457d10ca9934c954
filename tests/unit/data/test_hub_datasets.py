"""Laws of data sets on the hub: hf://datasets/ORG/NAME, from a server that speaks its protocol."""

import contextlib
import hashlib
import io
import json
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pyarrow as pa
import pytest
from huggingface_hub import HfFileSystem, constants, file_download
from pyarrow import parquet

from mjax.config import load
from mjax.data.base import dataset_files, object_store
from mjax.data.base.documents import document_text, expand_paths, read_documents
from mjax.data.corpus.stream import StreamedText
from mjax.errors import UserError
from tests.marks import slow
from tests.store_servers import Quiet, faulty_proxy, hang_up, page_of_a_proxy, served


def table(texts):
    out = io.BytesIO()
    parquet.write_table(pa.table({"n": list(range(len(texts))), "text": texts}), out)
    return out.getvalue()


CARD = b"""---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
---
"""
FILES = {
    "README.md": CARD,
    "data/train-0.parquet": table(["a", "b"]),
    "data/train-1.parquet": table(["c"]),
    "data/test-0.parquet": table(["held out"]),
    "more/all.jsonl": b'{"text": "more"}\n',
}
OLD, NEW = "0" * 40, "1" * 40


@contextlib.contextmanager
def hub_of_datasets(commits, asked):
    """A hub with org/texts at commits; the branch main is the last one."""

    def about(path, content):
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": path, "size": len(content), "oid": oid}

    class Handler(Quiet):
        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            asked.append(f"{self.command} {path}")
            api, of = "/api/datasets/org/texts", "/datasets/org/texts/resolve/"
            if path.startswith(of):
                commit, name = path.removeprefix(of).split("/", 1)
                self.media(commits[commit][name], commit)
                return
            kind, _, rest = path.removeprefix(api).strip("/").partition("/")
            revision, _, inside = rest.partition("/")
            commit = list(commits)[-1] if revision in ("", "main") else revision
            if not path.startswith(api) or commit not in commits:
                code = "RevisionNotFound" if path.startswith(api) else "RepoNotFound"
                self.answer(404, b"{}", {"X-Error-Code": code})
            elif kind in ("", "revision"):
                self.json({"id": "org/texts", "sha": commit, "siblings": []})
            else:
                self.listing(kind, commits[commit], inside)

        def listing(self, kind, files, inside):
            asked = self.content().decode()
            said = json.loads(asked) if asked.startswith("{") else parse_qs(asked)
            wanted = None if kind == "tree" else said["paths"]
            folders = {n.rsplit("/", i)[0] for n in files for i in range(1, n.count("/") + 1)}
            found = [about(*item) for item in files.items()]
            found += [{"type": "directory", "path": f, "oid": "0" * 40} for f in sorted(folders)]
            if wanted is not None:
                self.json([entry for entry in found if entry["path"] in wanted])
                return
            if inside in files:
                self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            self.json([e for e in found if not inside or e["path"].startswith(f"{inside}/")])

        do_HEAD = do_POST = do_GET

        def json(self, found):
            self.answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

        def media(self, content, commit):
            etag = hashlib.sha1(content).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
            if (said := self.headers.get("Range")) is None:
                self.answer(200, content, headers)
                return
            first, _, last = said.removeprefix("bytes=").partition("-")
            self.answer(206, content[int(first) : int(last) + 1], headers)

    with served(Handler) as url:
        yield url


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """(commits of org/texts, what is asked, a proxy that fails) of the hub that is asked."""
    commits, asked = {OLD: FILES}, []
    with hub_of_datasets(commits, asked) as url, faulty_proxy(url) as proxy:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, proxy.url)
        for module in (constants, file_download):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", proxy.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.0)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
        for cached in (object_store.file_system, dataset_files._at_commit):
            cached.cache_clear()
        HfFileSystem.clear_instance_cache()
        yield commits, asked, proxy


def read(place):
    return [document_text(d, None) for d in read_documents(expand_paths([place]))]


@pytest.mark.parametrize(
    "place, texts",
    [
        ("hf://datasets/org/texts", ["a", "b", "c"]),
        ("hf://datasets/org/texts:test", ["held out"]),
        ("hf://datasets/org/texts:default:train", ["a", "b", "c"]),
        (f"hf://datasets/org/texts@{OLD}:train", ["a", "b", "c"]),
        ("hf://datasets/org/texts@main/more/all.jsonl", ["more"]),
        ("hf://datasets/org/texts/data/*-0.parquet", ["held out", "a", "b"]),
    ],
)
def test_places_of_the_hub(place, texts, hub):
    assert read(place) == texts


@pytest.mark.parametrize(
    "place, wrong",
    [
        ("hf://datasets/org/texts:other", "no file of text of split 'other'"),
        ("hf://datasets/org/texts:fr:train", "no config 'fr'"),
        ("hf://datasets/org/none", "no such bucket"),
        ("hf://datasets/org/texts@gone", "no such bucket"),
        ("hf://org/texts", "write hf://datasets/ORG/NAME"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(place, wrong, hub):
    with pytest.raises(UserError, match=wrong) as e:
        read(place)
    assert "\n" not in str(e.value)


def test_faults_of_the_hub_pass(hub):
    _, _, proxy = hub
    proxy.of, proxy.faults = "train-0.parquet", [page_of_a_proxy, hang_up, page_of_a_proxy]
    assert read("hf://datasets/org/texts") == ["a", "b", "c"] and not proxy.faults


@slow
def test_a_process_reads_one_commit_and_a_stream_stays_on_what_it_began(hub):
    commits, _, _ = hub
    keys = ["data.stream=true", "data.tokenizer=byte", "data.seq_length=4", "model.vocab_size=300"]
    keys += ["data.mock=false", "data.split=[1,0,0]"]

    def stream(place="hf://datasets/org/texts"):
        cfg = load(None, [*keys, f"data.text={place}"])
        return StreamedText(cfg.data, "train", 7)

    first = stream()
    rows = first.batch(range(8))["tokens"]
    assert sorted(bytes(rows.reshape(-1)[:6].astype(np.uint8))) == [0, 0, 0, *b"abc"]
    record = first.record_of(8)
    commits[NEW] = FILES | {"data/train-2.parquet": table(["new"])}
    assert read("hf://datasets/org/texts") == ["a", "b", "c"]
    dataset_files._at_commit.cache_clear()  # another process
    HfFileSystem.clear_instance_cache()
    assert read("hf://datasets/org/texts") == ["a", "b", "c", "new"]
    with pytest.raises(UserError, match="name a commit of the hub by @COMMIT"):
        stream().go_on(record)
    pinned = stream(f"hf://datasets/org/texts@{OLD}")
    pinned.go_on(record)
    assert np.array_equal(pinned.batch([9])["tokens"], first.batch([9])["tokens"])
