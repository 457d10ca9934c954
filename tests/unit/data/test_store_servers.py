"""Laws of stores behind servers: S3's protocol from moto, Google's from a small one of ours.

They need packages that CI may lack: `pip install 'mjax[stores-test]'`. All cases are run by
`pytest -m 'slow or exhaustive' tests/unit/data/test_store_servers.py`.
"""

import json
import os
from pathlib import Path

import fsspec
import pytest

from mjax.checkpoint.base.hub import model_folder
from mjax.checkpoint.base.mirror import Mirror, fetched_weights
from mjax.data.base import object_store
from mjax.data.base.documents import document_text, expand_paths, read_documents
from mjax.errors import UserError
from tests.marks import slow
from tests.store_servers import (
    cut_body,
    faulty_proxy,
    google_refuses,
    google_store,
    hang_up,
    never,
    no_body,
    page_of_a_proxy,
    refuse,
    short_body,
    trickle,
)

pytestmark = slow
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it asks Google itself
TEXT = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(50))


@pytest.fixture(scope="module")
def amazon():
    """moto's server behind a proxy."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with faulty_proxy(f"http://127.0.0.1:{port}") as proxy:
        yield proxy
    server.stop()


@pytest.fixture
def s3(amazon, monkeypatch, tmp_path):
    """The proxy of an S3 with a bucket, without pauses or long patience."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": amazon.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "MJAX_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(object_store, "LONGEST_REQUEST", 1.0)
    s3fs.S3FileSystem.clear_instance_cache()
    object_store.file_system.cache_clear()
    fetched_weights.cache_clear()
    amazon.of, amazon.faults, amazon.asked = "", [], []
    fs = object_store.file_system("s3")
    if not fs.exists("bucket"):
        fs.mkdir("bucket")
    fs.pipe_file("bucket/text/a.jsonl", TEXT.encode())
    amazon.asked.clear()
    return amazon


def read(place="s3://bucket/text"):
    return [document_text(d, None) for d in read_documents(expand_paths([place]))]


PASSING = {
    "slow down": [refuse(503, "SlowDown")] * 2,
    "internal error": [refuse(500, "InternalError")],
    "bad gateway": [page_of_a_proxy],
    "too many requests": [refuse(429, "TooManyRequests")],
    "a connection that is closed": [hang_up],
    "one that is closed again and again": [hang_up] * 5,
    "a body that is cut": [cut_body],
    "a body that is too short": [short_body],
    "no body": [no_body],
    "no answer in time": [never],
    "a body that never ends": [trickle],
    "one after the other": [refuse(503, "SlowDown"), cut_body, hang_up, short_body],
}
FINAL = {
    "access denied": (refuse(403, "AccessDenied"), "the store refuses it"),
    "an unknown key": (refuse(403, "InvalidAccessKeyId"), "the store refuses it"),
    "a wrong signature": (refuse(403, "SignatureDoesNotMatch"), "the store refuses it"),
    "a wrong clock": (refuse(403, "RequestTimeTooSkewed"), "the store refuses it"),
    "an expired token": (refuse(400, "ExpiredToken"), "the store refuses it"),
    "no such bucket": (refuse(404, "NoSuchBucket"), "no such bucket, folder or object"),
    "no such key": (refuse(404, "NoSuchKey"), "no such bucket, folder or object"),
}


@pytest.mark.parametrize("fault", PASSING)
def test_faults_that_pass_are_not_seen(fault, s3):
    s3.of, s3.faults = "GET /bucket/text/a.jsonl", list(PASSING[fault])
    assert read() == [f"line {i}" for i in range(50)]
    assert not s3.faults and len(s3.asked) == len(PASSING[fault]) + 1


@pytest.mark.parametrize("fault", FINAL)
def test_faults_that_do_not_pass_are_one_line(fault, s3, tmp_path):
    s3.of, s3.faults = "GET /bucket/text/a.jsonl", [FINAL[fault][0]] * 9
    with pytest.raises(UserError) as e:
        read()
    assert FINAL[fault][1] in str(e.value) and "\n" not in str(e.value)
    assert len(s3.asked) == 1


def test_a_store_that_is_down_is_one_line(s3):
    s3.of, s3.faults = "GET /bucket/text/a.jsonl", [refuse(503, "SlowDown")] * 99
    with pytest.raises(UserError, match="6 times in a row; start again"):
        read()
    assert len(s3.asked) == object_store.TRIES


def test_what_is_not_there_is_one_line(s3):
    for place in ("s3://bucket/other/x.jsonl", "s3://no-such-bucket/x", "s3://bucket/none"):
        with pytest.raises(UserError, match="no such|no file of text") as e:
            read(place)
        assert "\n" not in str(e.value)


def test_faults_of_listings_pass(s3):
    s3.of, s3.faults = "GET /bucket?", [refuse(503, "SlowDown"), hang_up]
    assert len(read()) == 50 and not s3.faults


def test_an_object_that_changes_is_one_line(s3, tmp_path):
    found = object_store.stored_object("s3://bucket/text/a.jsonl")
    object_store.file_system("s3").pipe_file("bucket/text/a.jsonl", TEXT[::-1].encode())
    with pytest.raises(UserError, match="changed while it was read"):
        object_store.fetch(found, tmp_path / "copy")
    assert not list(tmp_path.glob("*copy*"))


def run_with_steps(folder: Path, *steps: int) -> Path:
    for step in steps:
        for name in ("state/d/a", "state/_METADATA", "meta/metadata", "digests.json"):
            file = folder / "checkpoints" / str(step) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"held_out_loss": 1 / step, "file": name}))
    return folder


def goes_round(address: str, tmp_path: Path) -> None:
    """A run's steps go to a store and back, and the oldest ones go there as here."""
    run = run_with_steps(tmp_path / "run", 2, 4)
    (run / "checkpoints" / "4" / "state" / "large").write_bytes(bytes(11 * 2**20))
    Mirror(run, address).push()
    run_with_steps(run, 6)
    old = run / "checkpoints" / "2"
    old.rename(tmp_path / "old")
    Mirror(run, address).push()
    assert Mirror(run, address).steps() == [4, 6]
    (tmp_path / "new").mkdir()
    assert Mirror(tmp_path / "new", address).pull() == 6
    assert Mirror(tmp_path / "new", address).pull() is None
    for here, there in ((model_folder(f"{address}@4"), 4), (tmp_path / "new/checkpoints/6", 6)):
        original = run / "checkpoints" / str(there)
        names = [p.relative_to(original) for p in original.rglob("*") if p.is_file()]
        assert {(here / name).read_bytes() == (original / name).read_bytes() for name in names} == {
            True
        }
    left = {s.address.removeprefix(f"{address}/") for s in object_store.list_objects(address)}
    assert not any(name.startswith("checkpoints/2/") for name in left)


def test_steps_go_to_s3_and_back(s3, tmp_path):
    goes_round("s3://bucket/run", tmp_path)


@pytest.mark.parametrize("fault", [refuse(503, "SlowDown"), hang_up, refuse(500, "InternalError")])
def test_faults_of_writes_pass(fault, s3, tmp_path):
    place = f"bucket/{tmp_path.name}"
    s3.of, s3.faults = f"PUT /{place}", [fault, None, fault, fault, None, fault]
    run = run_with_steps(tmp_path / "run", 2)
    Mirror(run, f"s3://{place}").push()
    assert Mirror(run, f"s3://{place}").steps() == [2] and not s3.faults


def test_a_write_that_is_refused_leaves_no_step(s3, tmp_path):
    run = run_with_steps(tmp_path / "run", 2)
    s3.of, s3.faults = "PUT /bucket/refused/checkpoints/2/meta", [refuse(403, "AccessDenied")] * 9
    with pytest.raises(UserError, match="refuses it"):
        Mirror(run, "s3://bucket/refused").push()
    assert Mirror(run, "s3://bucket/refused").steps() == []


@pytest.fixture
def gs(monkeypatch, tmp_path):
    gcsfs = pytest.importorskip("gcsfs")
    monkeypatch.setenv("MJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(object_store, "LONGEST_REQUEST", 1.0)
    fetched_weights.cache_clear()
    with google_store("bucket") as url, faulty_proxy(url) as proxy:
        monkeypatch.setattr(gcsfs.core.GCSFileSystem, "_emulator_location", proxy.url, False)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        gcsfs.GCSFileSystem.clear_instance_cache()
        object_store.file_system.cache_clear()
        yield proxy


def test_steps_go_to_google_and_back(gs, tmp_path):
    goes_round("gs://bucket/run", tmp_path)


def test_text_from_google_and_its_faults(gs, tmp_path):
    (tmp_path / "a.jsonl").write_text(TEXT)
    object_store.send_file(tmp_path / "a.jsonl", "gs://bucket/text/a.jsonl")
    gs.of, gs.faults = "text/a.jsonl", [None, page_of_a_proxy, cut_body, short_body]
    assert read("gs://bucket/text") == [f"line {i}" for i in range(50)]
    gs.of, gs.faults = "text/a.jsonl", [refuse(403, "Forbidden")] * 9
    with pytest.raises(UserError, match="the store refuses it"):
        read("gs://bucket/text/a.jsonl")
    gs.faults = []
    with pytest.raises(UserError, match="no such bucket|no file of text"):
        read("gs://bucket/none/a.jsonl")


GOOGLE_PASSING = {
    "slow down": [google_refuses(429)] * 2,
    "unavailable": [google_refuses(503), google_refuses(500)],
    "bad gateway": [page_of_a_proxy],
    "a connection that is closed": [hang_up],
    "a body that is cut": [cut_body],
    "a body that is too short": [short_body],
    "no body": [no_body],
    "no answer in time": [never],
    "a body that never ends": [trickle],
}
GOOGLE_FINAL = {
    "forbidden": (google_refuses(403), "the store refuses it"),
    "unauthorized": (google_refuses(401), "the store refuses it"),
    "no such object": (google_refuses(404), "no such bucket, folder or object"),
}


@pytest.fixture
def google_text(gs, tmp_path):
    (tmp_path / "a.jsonl").write_text(TEXT)
    object_store.send_file(tmp_path / "a.jsonl", "gs://bucket/text/a.jsonl")
    gs.of = "alt=media"
    return gs


@pytest.mark.parametrize("fault", GOOGLE_PASSING)
def test_faults_of_google_that_pass_are_not_seen(fault, google_text):
    google_text.faults = list(GOOGLE_PASSING[fault])
    assert read("gs://bucket/text") == [f"line {i}" for i in range(50)]
    assert not google_text.faults


@pytest.mark.parametrize("fault", GOOGLE_FINAL)
def test_faults_of_google_that_do_not_pass_are_one_line(fault, google_text):
    google_text.faults = [GOOGLE_FINAL[fault][0]] * 99
    with pytest.raises(UserError) as e:
        read("gs://bucket/text")
    assert GOOGLE_FINAL[fault][1] in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("fault", [google_refuses(503), hang_up, google_refuses(429)])
def test_faults_of_writes_to_google_pass(fault, gs, tmp_path):
    run = run_with_steps(tmp_path / "run", 2)
    gs.of, gs.faults = "POST ", [fault, None, fault]
    Mirror(run, "gs://bucket/faulty").push()
    assert Mirror(run, "gs://bucket/faulty").steps() == [2] and not gs.faults


def test_a_write_that_google_refuses_leaves_no_step(gs, tmp_path):
    run = run_with_steps(tmp_path / "run", 2)
    gs.of, gs.faults = "POST ", [None, None, *[google_refuses(403)] * 99]
    with pytest.raises(UserError, match="refuses it"):
        Mirror(run, "gs://bucket/refused").push()
    gs.faults = []
    assert Mirror(run, "gs://bucket/refused").steps() == []


def test_a_run_pulled_from_google_survives_faults(gs, tmp_path):
    run = run_with_steps(tmp_path / "run", 2)
    Mirror(run, "gs://bucket/back").push()
    (tmp_path / "new").mkdir()
    gs.of, gs.faults = "alt=media", [google_refuses(503), None, cut_body, hang_up]
    assert Mirror(tmp_path / "new", "gs://bucket/back").pull() == 2 and not gs.faults
    for file in (run / "checkpoints/2").rglob("*"):
        copy = tmp_path / "new/checkpoints/2" / file.relative_to(run / "checkpoints/2")
        assert file.is_dir() or file.read_bytes() == copy.read_bytes()
