"""`mjax bench serve`: what it asks is a function of the seed, what it reports is what came.

Percentiles are exact for replies whose times are given. Beside a server that waits a known time,
they are right within `SLACK`, which is what a busy machine adds.
"""

import asyncio
import json
import threading

import numpy as np
import pytest

pytest.importorskip("httptools", reason="needs the extra serve")
from mjax.bench import serve
from mjax.bench.exchange import RawReply, read_reply
from mjax.errors import UserError
from tests.marks import slow

SLACK = 60.0  # milliseconds
FIRST, BETWEEN, TOKENS = 0.1, 0.05, 5  # seconds; of the server's replies


def event(**given) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": None, **given}).encode() + b"\n\n"


def token(text: str = "a", **given) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": None, **given}])


END = event(usage={"prompt_tokens": 7, "completion_tokens": TOKENS}) + b"data: [DONE]\n\n"


class Server:
    """A server in a thread whose answer depends on a request's number, and what it was asked."""

    def __init__(self, *kinds: str):
        self.kinds, self.asked, self.heads = kinds, [], []
        self.loop, ready = asyncio.new_event_loop(), threading.Event()

        async def start() -> None:
            server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ready.set()

        self.loop.create_task(start())
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        ready.wait(10)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if head.startswith("GET"):
            self.write(writer, b'{"data": [{"id": "known"}]}', "200 OK")
            return
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        kind = self.kinds[len(self.asked) % len(self.kinds)]
        self.asked.append(body)
        if kind == "no ids" and not isinstance(body["prompt"], str) or kind == "full":
            self.write(writer, b'{"error": {"message": "too much"}}', "400 Bad Request")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        if kind == "hangs":
            await asyncio.sleep(5)
        pieces = [token()] * TOKENS + [END]
        if kind == "fails":
            pieces[2:] = [event(error={"message": "lost"}), b"data: [DONE]\n\n"]
        if kind == "breaks":
            pieces[2:] = []
        for number, piece in enumerate(pieces):
            if number < TOKENS and kind == "slow":
                await asyncio.sleep(BETWEEN if number else FIRST)
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")
        writer.close()

    def write(self, writer: asyncio.StreamWriter, body: bytes, status: str) -> None:
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status.encode(), len(body)))
        writer.write(body)
        writer.close()


def run(server: Server, *options: str, capsys) -> tuple[int, list[dict]]:
    """The exit code and the records of a small load on a server."""
    argv = ["--url", server.url, "--prompt=8", f"--new={TOKENS}", "--warmup=0", *options]
    code = serve.main(argv)
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def exchange(*pieces: tuple[float, bytes], sent: float = 0.0) -> RawReply:
    """A reply of which each piece came at its time."""
    made = RawReply(b"")
    made.sent, made.status = sent, 200
    for made.now, piece in pieces:
        made.on_body(piece)
    return made


# ---- what comes ----------------------------------------------------------------------------------


def test_times_are_those_at_which_an_event_was_complete():
    whole = token("a") + token("b") + token("c") + END
    cut = len(token("a")) + 9
    found = read_reply(
        exchange((1.0, whole[:cut]), (2.0, whole[cut : cut + 3]), (3.5, whole[cut + 3 :]))
    )
    assert (found.times, found.error) == ([1.0, 3.5, 3.5], None)
    assert (found.tokens_in, found.tokens_out) == (7, TOKENS)


def test_roles_and_reasons_of_an_end_are_no_tokens_and_half_characters_are():
    def delta(finish_reason: str | None = None, **given) -> bytes:
        return event(choices=[{"delta": given, "finish_reason": finish_reason}])

    pieces = [delta(role="assistant", content=""), delta(content="a"), delta(content="")]
    pieces += [delta(reasoning_content="b"), b": ping\n\n", delta("stop"), b"data: [DONE]\r\n\r\n"]
    found = read_reply(exchange(*enumerate(pieces)))
    assert (found.times, found.tokens_out, found.error) == ([1, 2, 3], 3, None)


def test_percentiles_and_goodput_are_exact():
    rows = []
    for n in range(101):  # first token after n ms; 3 tokens, 2n and 4n ms apart
        times = [1 + n / 1e3, 1 + 3 * n / 1e3, 1 + 7 * n / 1e3]
        pieces = [(when, token()) for when in times]
        end = event(usage={"prompt_tokens": 5, "completion_tokens": 4}), b"data: [DONE]\n\n"
        made = exchange(*pieces, *((times[-1], piece) for piece in end), sent=1.0)
        rows.append(serve.times_of(made, read_reply(made), 0.5, 0.25))
    rows.append({"error": "lost"})
    found = serve.summarize(rows, seconds=10, ttft=50.5, tpot=80.5)
    assert found["first_ms"] == pytest.approx({"p50": 50, "p90": 90, "p99": 99})
    assert found["e2e_ms"] == pytest.approx({"p50": 350, "p90": 630, "p99": 693})
    assert found["tpot_ms"] == pytest.approx({"p50": 100, "p90": 180, "p99": 198})
    gaps = np.concatenate([2 * np.arange(101), 4 * np.arange(101)])
    expected = dict(zip(("p50", "p90", "p99"), np.percentile(gaps, (50, 90, 99)), strict=True))
    assert found["between_ms"] == pytest.approx(expected, rel=1e-3)
    assert found["late_ms"]["p50"] == pytest.approx(250)
    assert (found["ok"], found["errors"]) == (101, {"lost": 1})
    assert found["goodput"] == pytest.approx(41 / 10)  # 6n / 3 <= 80
    assert serve.summarize(rows, 10, ttft=20.5, tpot=80.5)["goodput"] == pytest.approx(2.1)
    assert (found["tokens_out"], found["tokens_per_second"]) == (404, pytest.approx(40.4))
    assert (found["tokens_in"], found["requests_per_second"]) == (505, pytest.approx(10.1))


@slow
def test_a_server_that_waits_a_known_time(capsys, tmp_path):
    server, out, page = Server("slow"), tmp_path / "out.jsonl", tmp_path / "page.html"
    options = ["--requests=6", "--concurrency=3,6", f"--out={out}", f"--plot={page}", "--ttft=1"]
    code, records = run(server, *options, "--warmup=1", "--api-key=secret", capsys=capsys)
    assert code == 0 and [one["case"]["concurrency"] for one in records] == [3, 6]
    for record, waves in zip(records, (2, 1), strict=True):
        for name, ms in (("first_ms", FIRST), ("between_ms", BETWEEN), ("tpot_ms", BETWEEN)):
            assert 1e3 * ms - 2 <= record[name]["p50"] <= 1e3 * ms + SLACK, name
        least = waves * (FIRST + (TOKENS - 1) * BETWEEN)
        assert least - 0.01 <= record["seconds"] <= least + waves * SLACK * TOKENS / 1e3
        assert (record["ok"], record["tokens_out"], record["goodput"]) == (6, 6 * TOKENS, 0)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 14 and lines[6] == records[0] and len(lines[0]["between_ms"]) == TOKENS - 1
    assert "tokens a second" in page.read_text()
    prompts = [tuple(body["prompt"]) for body in server.asked]
    assert len(set(prompts)) == len(prompts) == 14  # no cache knows those of the second point
    assert {body["model"] for body in server.asked} == {"known"}
    assert all("Authorization: Bearer secret" in head for head in server.heads[1:])


@slow
def test_errors_are_counted_by_what_they_say(capsys):
    server = Server("slow", "full", "fails", "breaks", "hangs")
    code, (record,) = run(server, "--requests=10", "--timeout=2", capsys=capsys)
    expected = {
        "HTTP 400: too much",
        "lost",
        "the stream ended without [DONE]",
        "no end within 2 s",
    }
    assert record["errors"] == dict.fromkeys(expected, 2)
    assert (code, record["ok"], record["tokens_out"]) == (0, 2, 2 * TOKENS)


def test_a_server_that_is_not_there(capsys):
    with pytest.raises(UserError, match="http://127.0.0.1:9/v1/models: .*refused"):
        serve.main(["--url", "http://127.0.0.1:9"])
    argv = ["--url", "http://127.0.0.1:9/v1", "--model=m", "--requests=2"]
    with pytest.raises(UserError, match="a request to warm up failed: .*refused"):
        serve.main(argv)
    assert serve.main([*argv, "--warmup=0"]) == 1
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert record["ok"] == 0 and sum(record["errors"].values()) == 2 and record["ms"] is None


def test_text_where_ids_are_refused(capsys):
    server = Server("no ids")
    code, (record,) = run(server, "--requests=2", "--warmup=1", "--prefix=3", capsys=capsys)
    assert (code, record["ok"]) == (0, 2) and isinstance(server.asked[0]["prompt"], list)
    texts = [body["prompt"].split() for body in server.asked[1:]]
    assert {len(text) for text in texts} == {11} and len({tuple(t[:3]) for t in texts}) == 1


# ---- what is asked -------------------------------------------------------------------------------


def arguments(*options: str):
    return serve.read_arguments(["--url=http://x", "--model=m", *options])


def test_arrivals_are_a_function_of_the_seed():
    one = serve.arrivals(2000, 4.0, 1.0, seed=3)
    assert np.array_equal(one, serve.arrivals(2000, 4.0, 1.0, seed=3))
    assert not np.array_equal(one, serve.arrivals(2000, 4.0, 1.0, seed=4))
    gaps = np.diff(one)
    assert one[0] == 0 and gaps.mean() == pytest.approx(1 / 4, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.1)  # Poisson
    bursty = np.diff(serve.arrivals(2000, 4.0, 0.25, seed=3))
    assert bursty.mean() == pytest.approx(1 / 4, rel=0.15)
    assert bursty.std() == pytest.approx(2 / 4, rel=0.15)  # 1 / sqrt(0.25) times as wide
    assert not serve.arrivals(9, np.inf, 1.0, seed=3).any()


def test_lengths():
    rng = np.random.default_rng(0)
    assert serve.draw_lengths("7", 3, rng) == [7, 7, 7]
    assert set(serve.draw_lengths("2-4", 100, rng)) == {2, 3, 4}
    drawn = np.array(serve.draw_lengths("lognormal:300:0.5:2000", 4000, rng))
    assert drawn.mean() == pytest.approx(300, rel=0.05) and drawn.max() <= 2000
    for wrong in ("0", "x", "4-2", "lognormal:3", "lognormal:-1:1:2", "2-"):
        with pytest.raises(UserError, match="length .*: give a number"):
            assert serve.draw_lengths(wrong, 3, rng) == wrong


def test_prompts_of_a_group_share_their_prefix_and_no_more():
    args = arguments("--prompt=2-9", "--new=3-5", "--prefix=6", "--groups=2", "--vocab=50")
    asked = serve.requests_of(args, 40, 0)
    assert asked == serve.requests_of(args, 40, 0) != serve.requests_of(args, 40, 1)
    assert len({tuple(prompt[:6]) for prompt, _ in asked}) == 2
    assert {len(prompt) for prompt, _ in asked} == set(range(8, 16))
    assert {new for _, new in asked} == {3, 4, 5}
    assert max(max(prompt) for prompt, _ in asked) < 50


def test_files_of_prompts(tmp_path):
    turns = [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "x" * 41}]
    (shared := tmp_path / "shared.json").write_text(json.dumps([{"conversations": turns}] * 2))
    assert serve.requests_of(arguments(f"--file={shared}"), 3, 0) == [("hi there", 10)] * 3
    (lines := tmp_path / "l.jsonl").write_text(
        '{"prompt": [1, 2]}\n\n{"prompt": "a", "max_tokens": 9}'
    )
    found = serve.requests_of(arguments(f"--file={lines}", "--prefix=1"), 2, 0)
    assert sorted(new for _, new in found) == [9, 200]
    assert {new for _, new in serve.requests_of(arguments(f"--file={lines}", "--new=4"), 2, 0)} == {
        4
    }
    for text, wrong in (
        ('{"question": "a"}', "'prompt'"),
        ("[]", "no prompts"),
        ("", "no prompts"),
    ):
        lines.write_text(text)
        with pytest.raises(UserError, match=f"l.jsonl: {wrong}; give ShareGPT's JSON"):
            serve.requests_of(arguments(f"--file={lines}"), 2, 0)


def test_bodies():
    args = arguments("--api=chat", '--body={"temperature": 0, "max_tokens": 1}')
    body = json.loads(serve.body_of(args, [0, 1], 9))
    assert body["messages"] == [{"role": "user", "content": "the of"}] and body["max_tokens"] == 1
    assert (
        body["ignore_eos"] and body["stream"] and body["stream_options"] == {"include_usage": True}
    )
    plain = json.loads(serve.body_of(arguments("--stop-at-eos"), "a", 9))
    assert not plain["ignore_eos"] and plain["temperature"] == 0
    drawn = json.loads(serve.body_of(arguments('--body={"temperature": 1}'), "a", 9))
    assert drawn["temperature"] == 1


@pytest.mark.parametrize(
    "option, message",
    [
        ("--rate=0", "--rate, .* above 0"),
        ("--rate=a", "--rate 'a': give numbers"),
        ("--concurrency=-1", "--concurrency is at least 0;"),
        ("--body=[1]", "--body .*: give a JSON object"),
        ("--url=localhost:8000", "--url localhost:8000: is no address"),
    ],
)
def test_options_out_of_range(option, message):
    with pytest.raises(UserError, match=message):
        serve.main(["--url=http://127.0.0.1:9", "--model=m", option])
