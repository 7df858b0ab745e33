"""report.py --serve: updates about a running job, access control, and the page in a browser."""

import http.client
import json
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megatron.tools import report
from megatron.tools.report_server import MAX_VERSIONS, LiveReport, ReportServer, changes
from megatron.tools.run_log import LogReader, RunFollower, read_run
from tests.browser import Page, needs_browser, opened_browser
from tests.harness import launch_on_ranks
from tests.unit_tests.tools.report_logs import HELD, PAGE_FACTS, RECORD, write_log

LINE = '{{"iteration": {step}, "lm_loss": {loss}, "consumed_samples": {step}, "stray_{step}": 1}}\n'


def applied(old: Any, change: list[Any] | None) -> Any:
    """Applies changes like report_live.js."""
    if change is None:
        return old
    if change[0] == "=":
        return change[1]
    if change[0] == "{":
        return {key: applied(value, change[1].get(key)) for key, value in old.items()}
    return [applied(item, change[1].get(str(index))) for index, item in enumerate(old)] + change[2]


def test_changes_make_the_new_value_of_the_old_one() -> None:
    chosen = random.Random(0)

    def value(depth: int) -> Any:
        if depth == 0 or chosen.random() < 0.3:
            return chosen.choice([None, True, 1, 1.0, 2.5, "a", "b", [], {}])
        if chosen.random() < 0.5:
            return [value(depth - 1) for _ in range(chosen.randrange(5))]
        return {key: value(depth - 1) for key in chosen.sample("abcd", chosen.randrange(4))}

    def edited(old: Any) -> Any:
        if chosen.random() < 0.2:
            return value(2)
        if isinstance(old, list):
            return [edited(item) for item in old] + [value(1) for _ in range(chosen.randrange(2))]
        return {key: edited(item) for key, item in old.items()} if isinstance(old, dict) else old

    for _ in range(500):
        old = value(4)
        new = edited(old)
        change = json.loads(json.dumps(changes(old, new)))
        assert json.dumps(applied(old, change)) == json.dumps(new)
        assert (change is None) == (json.dumps(old) == json.dumps(new))


def test_a_long_run_is_told_by_its_new_steps_alone() -> None:
    reader, contents = LogReader(), []
    noise = np.random.default_rng(0).normal(size=20_002).tolist()
    for step, value in enumerate(noise, 1):
        fields = {"lm_loss": 2 + value, "grad_norm": 1 + value**2, "seconds": 0.1, "consumed_samples": step}
        load = {"expert_load": {str(layer): [step % 7, 3, 5, 9] for layer in range(8)}} if step % 10 == 0 else {}
        reader.read_line(json.dumps({"iteration": step, **fields, **load}).encode())
        if step > 20_000:
            contents.append(report.page_content([reader.run(Path("steps.jsonl"))]))
    whole = len(json.dumps(contents[0]))
    assert whole < 400_000 and len(json.dumps(changes(*contents))) < 0.02 * whole


@pytest.mark.parametrize("ending", ["in place", "replaced"])
def test_a_follower_has_what_a_reader_of_the_whole_log_has(tmp_path: Path, ending: str) -> None:
    log = tmp_path / "run" / "steps.jsonl"
    follower = RunFollower(log.parent)
    assert follower.update() and "does not exist" in follower.problem and not follower.update()
    log.parent.mkdir()
    log.touch()
    assert follower.update() and "no line of a training step" in follower.problem
    whole = [LINE.format(step=step, loss=1 / step) for step in range(1, 9)]
    log.write_text("".join(whole[:4]) + whole[4][:20])
    assert follower.update() and follower.problem == "" and follower.run().steps.tolist() == [1, 2, 3, 4]
    with log.open("a") as file:
        file.write(whole[4][20:] + whole[5])
    assert follower.update() and not follower.update()
    assert follower.run().steps.tolist() == [1, 2, 3, 4, 5, 6] and follower.num_starts == 1
    # The run rewinds to step 3, and passes its previous last step before the next poll.
    again = whole[:3] + [LINE.format(step=step, loss=9.0 * step) for step in range(4, 12)]
    if ending == "replaced":
        (tmp_path / "new").write_text("".join(again))
        (tmp_path / "new").replace(log)
    else:
        log.write_text("".join(again))
    assert follower.update() and follower.num_starts == 2
    seen, expected = follower.run().series, read_run(log).series
    assert seen.keys() == expected.keys()
    for name, series in expected.items():
        np.testing.assert_array_equal(seen[name].steps, series.steps)
        np.testing.assert_array_equal(seen[name].values, series.values)
    log.write_text(whole[0])
    assert follower.update() and follower.run().steps.tolist() == [1]
    log.unlink()
    assert follower.update() and "contains no steps.jsonl" in follower.problem


def test_pages_of_any_version_come_to_the_same_content(tmp_path: Path) -> None:
    seconds, folder = [0.0], write_log(tmp_path / "a", 3)
    live = LiveReport([folder], report.page_content, clock=lambda: seconds[0])
    known: dict[str, Any] = {}
    versions = []
    for step in range(4, 12):
        seconds[0] += 60
        answer = live.answer(None)
        versions.append(answer["version"])
        known[answer["version"]] = json.loads(json.dumps(answer["content"]))
        assert live.answer(answer["version"])["changes"] is None
        with (folder / "steps.jsonl").open("a") as log:
            log.write(json.dumps({"iteration": step, "lm_loss": 1.0, "accuracy": step, "held": HELD}) + "\n")
    assert len(set(versions)) == 8 and live.answer(None)["version"] == versions[-1], "must not update again this soon"
    seconds[0] += 60
    latest = live.answer(None)
    for version in versions:
        answer = json.loads(json.dumps(live.answer(version)))
        assert answer["version"] == latest["version"]
        assert ("content" in answer) == (version in versions[: -MAX_VERSIONS + 1])
        assert answer.get("content") or applied(known[version], answer["changes"]) == latest["content"]
    assert "content" in live.answer("of-another-server-1")
    live.close()


# Over HTTP.


@contextmanager
def serving(folder: Path) -> Iterator[ReportServer]:
    live = LiveReport([folder], report.page_content)
    with ReportServer(("127.0.0.1", 0), live, assets=report.live_assets()) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: ReportServer, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    # Unlike request(), this does not normalize the path.
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": "localhost", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def test_only_the_pages_own_paths_are_answered(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "a", 3, **RECORD)
    (folder / "secret").write_text("a secret")
    with serving(folder) as server:
        assert {path.partition("-")[0] for path in server.assets} == {"/", "/page.js", "/plotly"}
        for path in server.assets:
            status, headers, body = ask(server, path)
            assert status == 200 and int(headers["Content-Length"]) == len(body) > 0
            assert ("immutable" in headers["Cache-Control"]) == path.startswith("/plotly")
            assert "default-src 'none'" in headers["Content-Security-Policy"]
        status, headers, body = ask(server, "/content.json?since=x")
        assert status == 200 and headers["Content-Type"].startswith("application/json")
        assert json.loads(body)["content"]["runs"][0]["last_step"] == 3
        names = [
            "secret",
            "steps.jsonl",
            "run.json",
            "report_page.html.jinja",
            "../a/secret",
            "..%2fa%2fsecret",
            "%2e%2e/a/secret",
        ]
        names += [
            "/secret",
            "./secret",
            f"{folder}/secret",
            "page.js/../secret",
            "..\\a\\secret",
            "content.json/",
            "\0",
        ]
        for name in [*names, "page.js?x", "etc/passwd", "../../../../../../../etc/passwd"]:
            status, _, body = ask(server, "/" + name.replace("\0", "%00"))
            assert status == 404 and b"secret" not in body and b"root:" not in body, name
        for target in (f"file://{folder}/secret", "http://localhost/secret", "*"):
            assert ask(server, target)[0] == 404
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT"):
            status, headers, _ = ask(server, "/content.json", method=method)
            assert (status, headers["Allow"]) == (405, "GET"), method
        assert ask(server, "/", method="BREW")[0] == 501


def test_names_that_others_let_point_here_are_refused(tmp_path: Path) -> None:
    with serving(write_log(tmp_path / "a", 3)) as server:
        port = server.server_address[1]
        for host in ("localhost", f"localhost:{port}", "127.0.0.1:1", "[::1]:8000", "127.1.2.3", "LOCALHOST"):
            assert ask(server, "/content.json", Host=host)[0] == 200, host
        hosts = [
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "[",
            "a@",
        ]
        for host in [*hosts, "192.168.1.7", "localhost@evil.example", "0.0.0.0"]:
            status, _, body = ask(server, "/content.json", Host=host)
            assert status == 403 and b"lm loss" not in body, host
    with ReportServer(("0.0.0.0", 0), server.live, assets={}) as server:
        assert not server.is_loopback and server.url.startswith("http://localhost:")
        hosts = ["192.168.1.7:1", socket.gethostname(), "localhost", "evil.example", f"{socket.gethostname()}.evil"]
        assert [server.is_own_name(host) for host in hosts] == [True, True, True, False, False]


def test_several_viewers_and_one_who_goes_away(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_log(tmp_path / "a", 20, layers=12)
    with serving(folder) as server:
        # One client sends nothing, and one disconnects in the middle of the response.
        address = ("127.0.0.1", server.server_address[1])
        idle = socket.create_connection(address)
        leaving = socket.create_connection(address)
        leaving.sendall(b"GET /content.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        leaving.close()
        found: list[int] = []

        def view() -> None:
            version = None
            for _ in range(5):
                _, _, body = ask(server, f"/content.json?since={version}")
                version = json.loads(body)["version"]
            found.append(int(version.rpartition("-")[2]))

        viewers = [threading.Thread(target=view) for _ in range(6)]
        for viewer in viewers:
            viewer.start()
        for viewer in viewers:
            viewer.join()
        assert found == [1] * 6
        idle.close()
    assert capfd.readouterr().err == ""


# From the command line.


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_log(tmp_path / "a", 3))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert report.main([folder, "--serve", "--port", str(port)]) == 1
    assert f"error: --port is {port}: another program listens on it" in capsys.readouterr().err
    assert report.main([folder, "--serve", "--port", "0", "--host", "203.0.113.7"]) == 1
    assert "error: --host is 203.0.113.7: " in capsys.readouterr().err
    assert report.main([str(tmp_path / "gone"), "--serve"]) == 1
    assert "gone does not exist: give the folder of" in capsys.readouterr().err
    for wrong in (["--port", "1"], ["--serve", "--port", "65536"], ["--serve", "--output", "x"], ["--host", "::1"]):
        with pytest.raises(SystemExit):
            report.main([folder, *wrong])
        assert "error: " in capsys.readouterr().err


def _serve_and_end(folder: Path, numbers: list[signal.Signals]) -> int:
    """Serves the folder until this rank's signal of `numbers` arrives, while a connection is open."""
    serve_forever = ReportServer.serve_forever

    def ask_and_end(port: int) -> None:
        connection = http.client.HTTPConnection("localhost", port, timeout=30)
        connection.request("GET", "/content.json")
        assert "contains no steps.jsonl" in json.loads(connection.getresponse().read())["content"]["waits"][0]
        os.kill(os.getpid(), numbers[int(os.environ["RANK"])])

    def asked(server: ReportServer, **options: Any) -> None:
        threading.Thread(target=ask_and_end, args=server.server_address[1:], daemon=True).start()
        serve_forever(server, **options)

    with patch.object(ReportServer, "serve_forever", asked):
        return report.main([str(folder), "--serve", "--port", "0", "--host", "0.0.0.0"])


def test_it_serves_a_folder_without_a_log_and_ends_cleanly_on_signals(tmp_path: Path) -> None:
    numbers = [signal.SIGINT, signal.SIGTERM]
    for outcome in launch_on_ranks(_serve_and_end, 2, tmp_path, numbers, backend=None, timeout=60):
        assert (outcome.error, outcome.value) == (None, 0)
        assert outcome.stdout.startswith("Report: http://") and outcome.stdout.endswith("\nReport: stopped\n")
        assert outcome.stderr.startswith("WARNING: --host is 0.0.0.0: anyone who can reach")
        assert len(outcome.stderr.splitlines()) == 1


# In a browser.

STATE = """({
  step: document.querySelector(".facts b").textContent, live: document.getElementById("live").textContent,
  place: Math.round(document.getElementById("load-layer").getBoundingClientRect().top),
  log: document.querySelector("#grad-norm input").checked, layer: document.querySelector("#load-layer input").value,
  shown: document.querySelector("#load-step .controls span").textContent,
  range: document.querySelector("#loss .plot").layout.xaxis.range,
  search: document.querySelector("input[type=search]").value, marked: document.querySelector("#loss").wasHere ?? null,
  rows: document.querySelectorAll("tr.set:not([hidden])").length,
})"""


# State that remains although all elements are recreated.
KEPT = ("log", "layer", "search", "rows", "range")


@pytest.mark.slow
@needs_browser
def test_a_page_follows_its_run_and_leaves_the_reader_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    log, whole = folder / "steps.jsonl", write_log(tmp_path / "whole", 12, **RECORD) / "steps.jsonl"
    lines = whole.read_text().splitlines(keepends=True)
    (folder / "run.json").write_text(whole.with_name("run.json").read_text())
    with serving(folder) as server, opened_browser(tmp_path) as page:
        page.open(server.url, width=1200, height=800)
        page.wait_for("document.body.innerText.includes('contains no steps.jsonl')")
        log.write_text("".join(lines[:12]))
        before = _reader_settles(page)
        assert before["step"].startswith("6") and before["rows"] == 1
        with log.open("a") as file:
            file.write("".join(lines[12:14]) + lines[14][:50])
        page.wait_for(f"{STATE}.step.startsWith('7')")
        after = page.evaluate(STATE)
        assert after == {**before, "step": after["step"], "live": after["live"], "shown": "step 7"}
        assert after["live"].startswith("live: step 7") and [round(end) for end in after["range"]] == [2, 5]
        # A new field adds a diagram, and the visible part of the page stays in place.
        with log.open("a") as file:
            file.write(lines[14][50:] + '{"iteration": 9, "lm_loss": 1.5, "consumed_samples": 9, "surprise": 2}\n')
        page.wait_for("document.getElementById('surprise') !== null")
        rebuilt = page.evaluate(STATE)
        assert {**rebuilt, "marked": after["marked"]}.items() >= {name: after[name] for name in KEPT}.items()
        assert abs(rebuilt["place"] - after["place"]) <= 2
        # Rewound to step 3.
        (tmp_path / "new").write_text("".join(lines[:6]))
        (tmp_path / "new").replace(log)
        page.wait_for(f"{STATE}.step.startsWith('3')")
        _asked_for_little(page, server.url)
        page.cut_off(True)
        page.wait_for("document.getElementById('live').className === 'bad'")
        assert "no answer from the server" in page.evaluate(STATE)["live"]
        page.cut_off(False)
        page.wait_for(f"{STATE}.live.startsWith('live: step 3')")


def _reader_settles(page: Page) -> dict[str, Any]:
    """Simulates a reader who has scrolled to a part of the page and made selections."""
    page.wait_for("document.querySelectorAll('.plot .main-svg').length > 40")
    seen = page.evaluate(PAGE_FACTS)
    assert seen["cut"] == [] and seen["width"] <= 1200 and "Experts of one layer" in seen["text"]
    page.evaluate(
        """(() => {
        document.querySelector("#grad-norm input").click();
        const slider = document.querySelector("#load-layer input"); slider.value = 1; slider.oninput();
        const search = document.querySelector("input[type=search]"); search.value = "num_lay"; search.oninput();
        document.querySelector("#loss").wasHere = "the same element";
        Plotly.relayout(document.querySelector("#loss .plot"), {"xaxis.range[0]": 2, "xaxis.range[1]": 5});
        document.getElementById("load-layer").scrollIntoView();
        })()"""
    )
    return dict(page.evaluate(STATE))


def _asked_for_little(page: Page, url: str) -> None:
    assert page.problems == []
    assert [asked for asked in page.requests if not asked.startswith(("data:", "blob:", url))] == []
    assert sum("plotly" in asked for asked in page.requests) == 1
    # The first request fetches everything, later ones only changes.
    queries = [asked.partition("content.json")[2] for asked in page.requests if "content.json" in asked]
    assert queries[0] == "" and len(queries) > 4
    assert [query for query in queries[1:] if not query.startswith("?since=")] == []
